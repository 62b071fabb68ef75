// Inverses of stacks of symmetric positive definite matrices by blocks, in place and in double:
// leaves, and what the products of blocks leave to do (backend/cuda/recursive_inverse.py).
//
//   block    first entry of a block of the first matrix; both triangles are read and written
//   stride   entries from a matrix to the next
//   ld       entries from a row to the next
//
// No atomics: results do not depend on the order of blocks of threads.

// Inverse of a block of at most 128 rows, by sweeps of Gauss and Jordan without pivots. Sweep k divides
// row k by the pivot, and subtracts column k times row k from all other rows.
//
//   codes    (matrices): 0; or first + the number of the first pivot that is not positive, from one.
//            A code that is not zero is kept. The block is then not written.
//
// One block (32, 32) for each matrix. A thread has 4 x 4 entries in registers, 32 apart. Rows and
// columns past `side` are those of the identity.
extern "C" __global__ void __launch_bounds__(1024)
leaf_inverse(double* __restrict__ block, long long stride, int ld, int side, int* __restrict__ codes,
             int first) {
  __shared__ double row[2][128], column[2][128], inverse_pivot[2];
  double* own = block + blockIdx.x * stride;
  const int x = threadIdx.x, y = threadIdx.y;
  double a[4][4];
  #pragma unroll
  for (int i = 0; i < 4; ++i)
    #pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int r = y + 32 * i, c = x + 32 * j;
      a[i][j] = r < side && c < side ? own[(long long)r * ld + c] : r == c ? 1.0 : 0.0;
    }
  // The threads of row and column k set their entries to zero and share the old ones, with -1 in the
  // column and the inverse in the row at the pivot. One subtraction then writes all entries.
  #pragma unroll
  for (int of = 0; of < 4; ++of)
    for (int at = 0; at < 32 && 32 * of + at < side; ++at) {
      const int now = at & 1;  // two buffers, so that a sweep has one barrier
      if (x == at)
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
          const bool pivot = i == of && y == at;
          column[now][y + 32 * i] = pivot ? -1.0 : a[i][of];
          if (!pivot) a[i][of] = 0.0;
        }
      if (y == at) {  // one warp
        const double pivot = __shfl_sync(0xffffffffu, a[of][of], at);
        const double inverse = pivot > 0.0 ? 1.0 / pivot : 0.0;  // zero for NaN, too
        if (x == 0) inverse_pivot[now] = inverse;
        #pragma unroll
        for (int j = 0; j < 4; ++j) {
          row[now][x + 32 * j] = j == of && x == at ? inverse : a[of][j] * inverse;
          a[of][j] = 0.0;
        }
      }
      __syncthreads();
      if (inverse_pivot[now] == 0.0) {  // the same for all threads
        if (x == 0 && y == 0 && codes[blockIdx.x] == 0)
          codes[blockIdx.x] = first + 32 * of + at + 1;
        return;
      }
      double left[4], right[4];
      #pragma unroll
      for (int i = 0; i < 4; ++i) {
        left[i] = column[now][y + 32 * i];
        right[i] = row[now][x + 32 * i];
      }
      #pragma unroll
      for (int i = 0; i < 4; ++i)
        #pragma unroll
        for (int j = 0; j < 4; ++j) a[i][j] -= left[i] * right[j];
    }
  #pragma unroll
  for (int i = 0; i < 4; ++i)
    #pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int r = y + 32 * i, c = x + 32 * j;
      if (r < side && c < side) own[(long long)r * ld + c] = a[i][j];
    }
}

// Both triangles of a block on the diagonal <- the mean of both. One block (32, 8) for each tile of
// 32 x 32 entries of the lower triangle; grid (tiles, matrices).
extern "C" __global__ void __launch_bounds__(256)
symmetrize(double* __restrict__ block, long long stride, int ld, int side) {
  __shared__ double below[32][33], above[32][33];
  double* own = block + blockIdx.y * stride;
  const Tile tile = lower_tile(blockIdx.x);
  const int x = threadIdx.x, row = tile.row * 32, column = tile.column * 32;
  for (int y = threadIdx.y; y < 32; y += 8) {
    if (row + y < side && column + x < side)
      below[y][x] = own[(long long)(row + y) * ld + column + x];
    if (column + y < side && row + x < side)
      above[y][x] = own[(long long)(column + y) * ld + row + x];
  }
  __syncthreads();
  for (int y = threadIdx.y; y < 32; y += 8) {
    if (row + y < side && column + x < side)
      own[(long long)(row + y) * ld + column + x] = 0.5 * (below[y][x] + above[x][y]);
    if (column + y < side && row + x < side)
      own[(long long)(column + y) * ld + row + x] = 0.5 * (above[y][x] + below[x][y]);
  }
}

// right <- the transposed block `below`, which has these rows and columns. One block (32, 8) for each
// tile of 32 x 32 entries; grid (tiles of a column, tiles of a row, matrices).
extern "C" __global__ void __launch_bounds__(256)
transpose_block(const double* __restrict__ below, double* __restrict__ right, long long stride, int ld,
                int rows, int columns) {
  __shared__ double turned[32][33];
  below += blockIdx.z * stride;
  right += blockIdx.z * stride;
  const int row = blockIdx.x * 32, column = blockIdx.y * 32, x = threadIdx.x;
  for (int y = threadIdx.y; y < 32; y += 8)
    if (row + y < rows && column + x < columns)
      turned[x][y] = below[(long long)(row + y) * ld + column + x];
  __syncthreads();
  for (int y = threadIdx.y; y < 32; y += 8)
    if (column + y < columns && row + x < rows)
      right[(long long)(column + y) * ld + row + x] = turned[y][x];
}
