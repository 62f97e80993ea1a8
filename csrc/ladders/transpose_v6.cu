// Idea: as many blocks as run at once, each with a ring of tiles: while one is turned and
//   stored, the next two are on their way.
// Wall: memory, and a step down: 87 % (144 us on an H200, 135 before). Other blocks did hide the
//   wait. Three tiles a block leave four blocks of a multiprocessor (occupancy falls from 71 % to
//   43 %), whose warps all stop at a barrier for each tile.
// Lever: small blocks again, as many as fit; and loads by the threads themselves, which need the
//   values in registers anyway.

#include "tma.cuh"

namespace fusedops {

constexpr int kStages = 3;

// `map` as in transpose_v5; tile_rows and tile_columns count the tiles.
__global__ void __launch_bounds__(kThreads)
    transpose_v6(const void* map, float4* out, int rows, int tile_rows, int tile_columns) {
  extern __shared__ unsigned char memory[];
  // Swizzled tiles start at a multiple of 1024 bytes; the launch asks for as much more.
  const unsigned offset = (1024 - shared_address(memory) % 1024) % 1024;
  float4* ring = reinterpret_cast<float4*>(memory + offset);
  __shared__ unsigned long long loaded[kStages];
  const int tiles = tile_rows * tile_columns;
  const auto load = [&](int tile, int stage) {
    load_tile(map, ring + stage * (kTileBytes / 16), &loaded[stage], tile % tile_rows * kTile,
              tile / tile_rows * kTile);
  };
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) init_barrier(&loaded[stage]);
    publish_barriers();
    acquire_map(map);
    for (int stage = 0; stage < kStages; ++stage) {
      const int tile = blockIdx.x + stage * gridDim.x;
      if (tile < tiles) load(tile, stage);
    }
  }
  __syncthreads();
  int stage = 0;
  unsigned parity = 0;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    wait_barrier(&loaded[stage], parity);
    store_turned(ring + stage * (kTileBytes / 16), out, tile % tile_rows * kTile,
                 tile / tile_rows * kTile, rows);
    __syncthreads();  // every thread has read the tile
    const int next = tile + kStages * gridDim.x;
    if (threadIdx.x == 0 && next < tiles) load(next, stage);
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
}

}  // namespace fusedops
