// Sums of partial products into a symmetric matrix: fixed order, decay, both triangles.
//
//   out     (side, side), row-major; the first `features` rows and columns are written here, and the
//           homogeneous coordinate by border_moment
//
// One thread writes each entry of `out`; beta = 0 overwrites, NaN included.
#define TILE 64  // of patch_products.cu

struct Sum {
  int row, column;  // a tile of the lower triangle, in units of TILE
  int begin, end;   // its entries in `sources`
};

__device__ __forceinline__ void blend(float* place, float value, float alpha, float beta) {
  *place = alpha * value + (beta == 0.0f ? 0.0f : beta * *place);
}

// out <- beta out + alpha (sum of parts), and its mirror image. Block (32, 8); grid (sums,
// (TILE/32)^2): a block writes 32 x 32 entries, both triangles along rows. A source is the index of
// a partial product; ~index subtracts it.
extern "C" __global__ void __launch_bounds__(256)
assemble_moment(float* __restrict__ out, const float* __restrict__ parts,
                const Sum* __restrict__ sums, const int* __restrict__ sources, int side,
                int features, float alpha, float beta) {
  __shared__ float turned[32][33];
  const Sum sum = sums[blockIdx.x];
  const int r0 = blockIdx.y / (TILE / 32) * 32, c0 = blockIdx.y % (TILE / 32) * 32;
  const int row0 = sum.row * TILE + r0, column0 = sum.column * TILE + c0, x = threadIdx.x;
  if (row0 + 31 < column0) return;  // above the diagonal
  for (int y = threadIdx.y; y < 32; y += 8) {
    const int row = row0 + y, column = column0 + x;
    float total = 0.0f;
    for (int s = sum.begin; s < sum.end; ++s) {
      const int source = sources[s], part = source < 0 ? ~source : source;
      const float found = parts[((long long)part * TILE + r0 + y) * TILE + c0 + x];
      total += source < 0 ? -found : found;
    }
    float* place = out + (long long)row * side + column;
    if (row < features && column <= row) {
      blend(place, total, alpha, beta);
      total = *place;
    }
    turned[x][y] = total;
  }
  __syncthreads();
  for (int y = threadIdx.y; y < 32; y += 8) {
    const int row = column0 + y, column = row0 + x;
    if (column < features && row < column) out[(long long)row * side + column] = turned[y][x];
  }
}

// Copies the lower triangle to the upper one. Block (32, 8), one for each 32 x 32 tile of the lower triangle:
// grid (tiles), counted row by row.
extern "C" __global__ void __launch_bounds__(256) mirror(float* __restrict__ out, int side) {
  __shared__ float turned[32][33];
  const Tile tile = lower_tile(blockIdx.x);
  const int x = threadIdx.x;
  for (int y = threadIdx.y; y < 32; y += 8) {
    const int row = tile.row * 32 + y, column = tile.column * 32 + x;
    if (row < side && column < side) turned[x][y] = out[(long long)row * side + column];
  }
  __syncthreads();
  for (int y = threadIdx.y; y < 32; y += 8) {
    const int row = tile.column * 32 + y, column = tile.row * 32 + x;
    if (row < column && column < side) out[(long long)row * side + column] = turned[y][x];
  }
}
