// Moving averages of arrays, sums of the partial results of pieces, and counts of ids. Grid-stride
// loops, blocks of 256.

struct __align__(16) FourFloats {
  float at[4];
};
struct __align__(4 * sizeof(scalar)) FourScalars {
  scalar at[4];
};

__device__ __forceinline__ float blend(float old, float measured, float alpha, float beta) {
  return alpha * measured + (beta == 0.0f ? 0.0f : beta * old);
}

// average <- beta average + alpha measured; `measured` has the type INPUT. beta = 0 overwrites, NaN
// included. A thread has four entries at a time, if both arrays begin at a multiple of 16 bytes.
extern "C" __global__ void __launch_bounds__(256)
update_average(float* __restrict__ average, const scalar* __restrict__ measured, long long numbers,
               float alpha, float beta) {
  const long long step = (long long)gridDim.x * blockDim.x;
  const long long thread = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  const long long fours = ((long long)average | (long long)measured) % 16 ? 0 : numbers / 4;
  #pragma unroll 2
  for (long long i = thread; i < fours; i += step) {
    const FourScalars x = ((const FourScalars*)measured)[i];
    FourFloats y = ((const FourFloats*)average)[i];
    #pragma unroll
    for (int j = 0; j < 4; ++j) y.at[j] = blend(y.at[j], read(x.at + j), alpha, beta);
    ((FourFloats*)average)[i] = y;
  }
  for (long long i = 4 * fours + thread; i < numbers; i += step)
    average[i] = blend(average[i], read(measured + i), alpha, beta);
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
