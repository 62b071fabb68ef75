// Conversion of symmetric matrices to damped double precision, and back.
//
//   stack, found   (matrices, side, side), float or double by INPUT
//   wide           the same matrices in double
//
// Of the stack, the lower triangle is read; of the wide matrices, the upper triangle, in which
// cuSOLVER works (see Solvers). Both triangles are written. One block (32, 8) for each tile of
// 32 x 32 entries, so that reads and writes run along rows; grid (matrices * tiles). No atomics: sums
// have a fixed order.

// Returns the offset of the matrix of a block, and its tile.
__device__ __forceinline__ long long matrix_of_block(int tiles, int side, Tile* tile) {
  *tile = lower_tile(blockIdx.x % tiles);
  return (long long)(blockIdx.x / tiles) * side * side;
}

// Maximum and sum over a block, in every thread.
__device__ __forceinline__ double block_max(double value, double* warps) {
  for (int distance = 16; distance; distance /= 2)
    value = fmax(value, __shfl_down_sync(0xffffffffu, value, distance));
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  if (thread % 32 == 0) warps[thread / 32] = value;
  __syncthreads();
  for (int warp = 0; warp < 8; ++warp) value = warp ? fmax(value, warps[warp]) : warps[0];
  __syncthreads();
  return value;
}
__device__ __forceinline__ double block_total(double value, double* warps) {
  for (int distance = 16; distance; distance /= 2)
    value += __shfl_down_sync(0xffffffffu, value, distance);
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  if (thread % 32 == 0) warps[thread / 32] = value;
  __syncthreads();
  for (int warp = 0; warp < 8; ++warp) value = warp ? value + warps[warp] : warps[0];
  __syncthreads();
  return value;
}

// Unit in which entries are squared: squares of doubles may overflow or vanish, squares of floats in
// double cannot. Never so small that its inverse overflows.
__device__ __forceinline__ double unit(double largest) {
  return INPUT == 3 ? fmax(largest, 1e-300) : 1.0;
}

struct Part {
  double bad, largest, squares, trace;  // squares are in the unit of the tile
};

// wide <- stack, both triangles, with zeros for NaN and infinity; parts (matrices, tiles) <- the terms
// of each tile in the facts of its matrix, over both triangles.
extern "C" __global__ void __launch_bounds__(256)
widen(const scalar* __restrict__ stack, double* __restrict__ wide, Part* __restrict__ parts,
      int tiles, int side) {
  __shared__ double turned[32][33], warps[8];
  Tile tile;
  const long long matrix = matrix_of_block(tiles, side, &tile);
  double own[4], largest = 0.0, bad = 0.0, trace = 0.0, squares = 0.0;
  #pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int y = threadIdx.y + 8 * i, x = threadIdx.x;
    const int row = tile.row * 32 + y, column = tile.column * 32 + x;
    own[i] = 0.0;
    if (row < side && column <= row) {
      const long long place = matrix + (long long)row * side + column;
      own[i] = (double)stack[place];
      if (!(fabs(own[i]) <= 1.7976931348623157e308)) {
        bad = 1.0;
        own[i] = 0.0;
      }
      wide[place] = own[i];
      if (row == column) trace += own[i];
      largest = fmax(largest, fabs(own[i]));
    }
    turned[x][y] = own[i];
  }
  largest = block_max(largest, warps);  // its barriers also order the writes and reads of `turned`
  const double scale = 1.0 / unit(largest);
  #pragma unroll
  for (int i = 0; i < 4; ++i) {
    const bool diagonal = tile.row == tile.column && threadIdx.x == threadIdx.y + 8 * i;
    const double found = own[i] * scale;
    squares += (diagonal ? 1.0 : 2.0) * found * found;
  }
  const Part part = {block_max(bad, warps), largest, block_total(squares, warps),
                     block_total(trace, warps)};
  if (threadIdx.x == 0 && threadIdx.y == 0) parts[blockIdx.x] = part;
  for (int y = threadIdx.y; y < 32; y += 8) {
    const int row = tile.column * 32 + y, column = tile.row * 32 + threadIdx.x;
    if (row < column && column < side)
      wide[matrix + (long long)row * side + column] = turned[y][threadIdx.x];
  }
}

struct Facts {
  double finite, zero, damping, trace;
};

// The diagonal of each matrix of wide += its damping, and facts (matrices) <- its facts.
// The damping is asked[matrix], raised to epsilon times the Frobenius norm and to `least`. One block of 256 for each matrix.
extern "C" __global__ void __launch_bounds__(256)
damp(double* __restrict__ wide, const Part* __restrict__ parts, const double* __restrict__ asked,
     Facts* __restrict__ facts, int tiles, int side, double epsilon, double least) {
  __shared__ double warps[8];
  const Part* own = parts + (long long)blockIdx.x * tiles;
  double bad = 0.0, largest = 0.0, squares = 0.0, trace = 0.0;
  for (int i = threadIdx.x; i < tiles; i += 256) {
    bad = fmax(bad, own[i].bad);
    largest = fmax(largest, own[i].largest);
    trace += own[i].trace;
  }
  bad = block_max(bad, warps);
  largest = block_max(largest, warps);
  for (int i = threadIdx.x; i < tiles; i += 256) {
    const double share = unit(own[i].largest) / unit(largest);
    squares += own[i].squares * share * share;
  }
  const double norm = unit(largest) * sqrt(block_total(squares, warps));
  trace = block_total(trace, warps);
  const double damping = fmax(asked[blockIdx.x], fmax(epsilon * norm, least));
  double* matrix = wide + (long long)blockIdx.x * side * side;
  for (int i = threadIdx.x; i < side; i += 256) matrix[i * (side + 1LL)] += damping;
  if (threadIdx.x == 0) {
    const Facts found = {bad == 0.0 ? 1.0 : 0.0, largest == 0.0 ? 1.0 : 0.0, damping, trace};
    facts[blockIdx.x] = found;
  }
}

// found <- wide, rounded, both triangles. Blocks read the tiles above the diagonal.
extern "C" __global__ void __launch_bounds__(256)
narrow(const double* __restrict__ wide, scalar* __restrict__ found, int tiles, int side) {
  __shared__ double turned[32][33];
  Tile tile;
  const long long matrix = matrix_of_block(tiles, side, &tile);
  for (int y = threadIdx.y; y < 32; y += 8) {
    const int row = tile.column * 32 + y, column = tile.row * 32 + threadIdx.x;
    if (column < side && row <= column) {
      const long long place = matrix + (long long)row * side + column;
      turned[threadIdx.x][y] = wide[place];
      found[place] = (scalar)wide[place];
    }
  }
  __syncthreads();
  for (int y = threadIdx.y; y < 32; y += 8) {
    const int row = tile.row * 32 + y, column = tile.column * 32 + threadIdx.x;
    if (row < side && column < row)
      found[matrix + (long long)row * side + column] = (scalar)turned[y][threadIdx.x];
  }
}
