// Products of many small matrices of any shapes in one launch: out <- alpha left right + beta plus.
//
//   products   for each product its matrices, sizes and scales, and the number of its first block; the
//              blocks of a product have its tiles in row-major order
//
// Entry (r, c) of a matrix is (r / inner) * outer + (r % inner) * step + c * column numbers after its
// address: the rows of a filter are taps and channels in any order of memory. Blocks (32, 8) compute a
// tile of 32 x 32 entries, four for each thread. `plus` may be `out`; it is not read for a beta of zero.
// No atomics: the order of a sum is fixed.

struct Matrix {
  long long address;
  int inner, outer, step, column;
};
struct Product {
  Matrix left, right, plus, out;
  int rows, columns, depth, first;
  float alpha, beta;
};

__device__ __forceinline__ float* entry(const Matrix& m, int row, int column) {
  return (float*)m.address + (long long)(row / m.inner) * m.outer +
         (long long)(row % m.inner) * m.step + (long long)column * m.column;
}

extern "C" __global__ void __launch_bounds__(256)
small_products(const Product* __restrict__ products, int count) {
  __shared__ float left[32][33], right[32][33];
  int found = 0, after = count;  // the last product whose first block is not after this one
  while (after - found > 1) {
    const int middle = (found + after) / 2;
    if (products[middle].first <= (int)blockIdx.x) found = middle;
    else after = middle;
  }
  const Product own = products[found];
  const int tile = blockIdx.x - own.first, across = (own.columns + 31) / 32;
  const int x = threadIdx.x, y = threadIdx.y;
  const int top = tile / across * 32, column = tile % across * 32 + x;
  float sums[4] = {};
  for (int k = 0; k < own.depth; k += 32) {
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = top + y + 8 * i, deep = k + y + 8 * i;
      left[y + 8 * i][x] =
          row < own.rows && k + x < own.depth ? *entry(own.left, row, k + x) : 0.0f;
      right[y + 8 * i][x] =
          deep < own.depth && column < own.columns ? *entry(own.right, deep, column) : 0.0f;
    }
    __syncthreads();
    #pragma unroll
    for (int j = 0; j < 32; ++j)
      #pragma unroll
      for (int i = 0; i < 4; ++i) sums[i] += left[y + 8 * i][j] * right[j][x];
    __syncthreads();
  }
  #pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = top + y + 8 * i;
    if (row >= own.rows || column >= own.columns) continue;
    const float plus = own.beta == 0.0f ? 0.0f : own.beta * *entry(own.plus, row, column);
    *entry(own.out, row, column) = own.alpha * sums[i] + plus;
  }
}
