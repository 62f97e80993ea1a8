// A square block of elements, one 16-byte vector a row, transposed in one thread's registers.
#pragma once

namespace fusedops {

// Word `index` of a vector; a constant index costs nothing.
__device__ __forceinline__ unsigned word_of(const uint4& vector, int index) {
  return index == 0 ? vector.x : index == 1 ? vector.y : index == 2 ? vector.z : vector.w;
}

// Column `column` of the block of elements of kBytes whose rows are `rows`. `column` must be a
// constant after unrolling: elements of 4 and 8 bytes are then renamed registers and cost nothing,
// smaller ones one (2 bytes) or two (1 byte) byte permutations for each 32-bit word (PTX ISA,
// "prmt"). The words are never handled as elements, which the compiler would take apart one by one.
template <int kBytes>
__device__ __forceinline__ uint4 block_column(const uint4 (&rows)[16 / kBytes], int column) {
  unsigned out[4];
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    if constexpr (kBytes == 8) {
      out[q] = word_of(rows[q / 2], 2 * column + q % 2);
    } else if constexpr (kBytes == 4) {
      out[q] = word_of(rows[q], column);
    } else if constexpr (kBytes == 2) {
      const int word = column / 2;
      const unsigned select = column % 2 == 0 ? 0x5410 : 0x7632;
      out[q] = __byte_perm(word_of(rows[2 * q], word), word_of(rows[2 * q + 1], word), select);
    } else {
      // Pairs of bytes first, which columns 4 w and 4 w + 1 share, as do 4 w + 2 and 4 w + 3.
      const int word = column / 4;
      const unsigned pair = column % 4 < 2 ? 0x5140 : 0x7362;
      const unsigned low =
          __byte_perm(word_of(rows[4 * q], word), word_of(rows[4 * q + 1], word), pair);
      const unsigned high =
          __byte_perm(word_of(rows[4 * q + 2], word), word_of(rows[4 * q + 3], word), pair);
      out[q] = __byte_perm(low, high, column % 2 == 0 ? 0x5410 : 0x7632);
    }
  }
  return make_uint4(out[0], out[1], out[2], out[3]);
}

}  // namespace fusedops
