// Sums of partial products into a symmetric matrix: fixed order, decay, both triangles.
//
//   targets   matrices of several layers
//
// One thread writes each entry of `out`; beta = 0 overwrites, NaN included.
#define TILE 64  // of patch_products.cu and pair_products.cu
#define AHEAD 8  // loads in flight

// out <- beta out + alpha (sum). The matrix is (side, side), row-major. Rows and columns of features are
// written here, and the homogeneous coordinate by add_sums.
struct Target {
  float* out;
  int side;
  float alpha, beta;
};

struct Sum {
  int row, column;    // the first entry of a tile on or below the diagonal
  int rows, columns;  // its size; parts have TILE rows and columns
  int begin, end;     // its entries in `sources`
  int layer;          // its matrix
};

__device__ __forceinline__ void blend(float* place, float value, float alpha, float beta) {
  *place = alpha * value + (beta == 0.0f ? 0.0f : beta * *place);
}

// The sum of one entry of all parts of a tile, in order. Many loads are in flight, because a small
// matrix has few tiles with hundreds of parts.
__device__ __forceinline__ float summed(const float* __restrict__ parts,
                                        const int* __restrict__ sources, Sum sum, int entry) {
  float total = 0.0f;
  for (int s = sum.begin; s < sum.end; s += AHEAD) {
    float found[AHEAD];
    #pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const int source = s + i < sum.end ? sources[s + i] : 0, part = source < 0 ? ~source : source;
      const float value = s + i < sum.end ? parts[(long long)part * TILE * TILE + entry] : 0.0f;
      found[i] = source < 0 ? -value : value;
    }
    #pragma unroll
    for (int i = 0; i < AHEAD; ++i) total += found[i];
  }
  return total;
}

// Tiles of matrices, and their mirror images. Block (32, 8), a thread for each entry; grid (sums, TILE/8 *
// TILE/32). A source is the index of a partial product; ~index subtracts it. Both triangles are written
// in runs of at least 32 bytes.
extern "C" __global__ void __launch_bounds__(256)
assemble_moments(const Target* __restrict__ targets, const float* __restrict__ parts,
                 const Sum* __restrict__ sums, const int* __restrict__ sources) {
  __shared__ float turned[32][9];
  const Sum sum = sums[blockIdx.x];
  const Target& target = targets[sum.layer];
  float* out = target.out;
  const int side = target.side, x = threadIdx.x, y = threadIdx.y;
  const int r0 = blockIdx.y / (TILE / 32) * 8, c0 = blockIdx.y % (TILE / 32) * 32;
  const int row0 = sum.row + r0, column0 = sum.column + c0;
  if (row0 + 7 < column0) return;  // above the diagonal
  const int row = row0 + y, column = column0 + x;
  if (r0 + y < sum.rows && c0 + x < sum.columns && column <= row) {
    float* place = out + (long long)row * side + column;
    const float total = summed(parts, sources, sum, (r0 + y) * TILE + c0 + x);
    blend(place, total, target.alpha, target.beta);
    turned[x][y] = *place;
  }
  __syncthreads();
  // The thread that writes an entry of the other triangle: eight neighbours write along a row.
  const int thread = y * 32 + x, other_x = thread / 8, other_y = thread % 8;
  const int above = column0 + other_x, right = row0 + other_y;
  if (r0 + other_y < sum.rows && c0 + other_x < sum.columns && above < right)
    out[(long long)above * side + right] = turned[other_x][other_y];
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
