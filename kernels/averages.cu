// Moving averages of arrays, sums of the partial results of pieces, and counts of ids. Grid-stride
// loops, blocks of 256.

// average <- beta average + alpha measured; `measured` has the type INPUT. beta = 0 overwrites, NaN
// included.
extern "C" __global__ void __launch_bounds__(256)
update_average(float* __restrict__ average, const scalar* __restrict__ measured, long long numbers,
               float alpha, float beta) {
  const long long step = (long long)gridDim.x * blockDim.x;
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < numbers; i += step)
    average[i] = alpha * read(measured + i) + (beta == 0.0f ? 0.0f : beta * average[i]);
}

// counts[id] += 1 for each id in [0, rows); other ids are padding. Integers: the result does not
// depend on the order of the additions.
extern "C" __global__ void __launch_bounds__(256)
count_ids(const long long* __restrict__ ids, int* __restrict__ counts, long long numbers, int rows) {
  const long long step = (long long)gridDim.x * blockDim.x;
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < numbers; i += step)
    if (ids[i] >= 0 && ids[i] < rows) atomicAdd(&counts[ids[i]], 1);
}

// out (groups, rows, columns) <- beta out + alpha (sum of pieces, in order). If `mirrored`, the lower
// triangle is copied to the upper one. beta = 0 overwrites.
extern "C" __global__ void __launch_bounds__(256)
add_parts(float* __restrict__ out, const float* __restrict__ parts, int pieces, Work work,
          int mirrored, float alpha, float beta) {
  const long long each = (long long)work.rows * work.columns, numbers = work.groups * each;
  const long long step = (long long)gridDim.x * blockDim.x;
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < numbers; i += step) {
    const int row = (int)(i % each / work.columns), column = (int)(i % work.columns);
    long long from = i;
    if (mirrored && column > row) from = i / each * each + (long long)column * work.columns + row;
    float sum = 0.0f;
    for (int piece = 0; piece < pieces; ++piece) sum += parts[piece * numbers + from];
    out[i] = alpha * sum + (beta == 0.0f ? 0.0f : beta * out[i]);
  }
}
