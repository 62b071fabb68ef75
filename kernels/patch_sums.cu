// Sums over patches without copies of patches: of the pixels of each tap, or of their squares.
//
// Images are summed first: the pixels of a tap do not depend on the image. No atomics: one thread or
// one block computes each sum, in a fixed order. A launch has the blocks of all layers, one layer after
// another.
//
//   layers  images of several layers, and what receives their sums
//   SQUARED 1: sums of squares, of one number for each feature; 0: the last row and column of a matrix
#ifndef SQUARED
#define SQUARED 0
#endif

struct SummedLayer {
  const void* x;  // images of any strides
  float* totals;  // (pieces, channels, pixels): sums over the images of a piece
  float* out;     // (features), or (features + 1, features + 1)
  Images images;
  Taps taps;
  Grid grid;
  int features;
  int across;                        // 1 if channels are closer in memory than pixels
  int pieces, length;                // number of pieces, and images of one
  int first_totals, first_features;  // the first block of sum_images and of add_sums
  float count, alpha, beta;          // count: number of patches
};

// totals <- sum over the images of each piece. Block 256: a thread sums one pixel of one channel, and
// adjacent threads read adjacent memory. The blocks of a layer are (pieces, ceil(channels * pixels /
// 256)).
extern "C" __global__ void __launch_bounds__(256)
sum_images(const SummedLayer* __restrict__ layers, int count) {
  int which = 0;
  while (which + 1 < count && (int)blockIdx.x >= layers[which + 1].first_totals) ++which;
  const SummedLayer& layer = layers[which];
  const Images& g = layer.images;
  const int pixels = g.shape[0] * g.shape[1] * g.shape[2];
  const long long numbers = (long long)pixels * g.channels;
  const int block = blockIdx.x - layer.first_totals, blocks = (int)((numbers + 255) / 256);
  const int piece = block / blocks;
  const long long index = block % blocks * 256LL + threadIdx.x;
  if (index >= numbers) return;
  const int channel = (int)(layer.across ? index % g.channels : index / pixels);
  const int pixel = (int)(layer.across ? index / g.channels : index % pixels);
  const int begin = piece * layer.length, end = min(begin + layer.length, g.images);
  const long long stride = g.image_stride;
  const scalar* from = (const scalar*)layer.x + channel * g.channel_stride + begin * stride;
  int rest = pixel;
  for (int axis = 2; axis >= 0; --axis) {
    from += rest % g.shape[axis] * g.pixel_strides[axis];
    rest /= g.shape[axis];
  }
  float sum = 0.0f, lost = 0.0f;  // Kahan summation, for thousands of images
  #pragma unroll 4
  for (int image = begin; image < end; ++image, from += stride) {
    const float found = read(from);
    const float next = (SQUARED ? found * found : found) - lost, larger = sum + next;
    lost = (larger - sum) - next;
    sum = larger;
  }
  layer.totals[piece * numbers + (long long)channel * pixels + pixel] = sum;
}

// Returns the sum of feature f = tap * channels + channel over all outputs and pieces, in the first of
// the 256 threads of a block. A thread reads every 256th output, counted piece by piece, and advances
// without divisions.
__device__ __forceinline__ float tap_sum(int f, const SummedLayer& layer, float* warps) {
  const Images& g = layer.images;
  const long long pixels = g.shape[0] * g.shape[1] * g.shape[2];
  const float* from = layer.totals + f % g.channels * pixels;
  int first[3], at[3], step[3], piece = threadIdx.x, pieces = 256;
  first_pixels(f / g.channels, layer.taps, layer.grid, first);
  #pragma unroll
  for (int axis = 2; axis >= 0; --axis) {
    const int side = layer.grid.outputs[axis];
    at[axis] = piece % side;
    piece /= side;
    step[axis] = pieces % side;
    pieces /= side;
  }
  float sum = 0.0f;
  while (piece < layer.pieces) {
    long long place = (long long)piece * g.channels;
    bool inside = true;
    #pragma unroll
    for (int axis = 0; axis < 3; ++axis) {
      const int pixel = at[axis] * layer.taps.strides[axis] + first[axis];
      inside &= (unsigned)pixel < (unsigned)g.shape[axis];
      place = place * g.shape[axis] + pixel;
    }
    if (inside) sum += from[place];
    int carry = 0;
    #pragma unroll
    for (int axis = 2; axis >= 0; --axis) {
      at[axis] += step[axis] + carry;
      carry = at[axis] >= layer.grid.outputs[axis];
      at[axis] -= carry ? layer.grid.outputs[axis] : 0;
    }
    piece += pieces + carry;
  }
  return block_sum(sum, warps);
}

// out <- beta out + alpha (sums of features, and the count of patches behind them). Block 256: one
// feature, or the corner of a matrix. The blocks of a layer are its features, and one for a corner.
extern "C" __global__ void __launch_bounds__(256)
add_sums(const SummedLayer* __restrict__ layers, int count) {
  __shared__ float warps[8];
  int which = 0;
  while (which + 1 < count && (int)blockIdx.x >= layers[which + 1].first_features) ++which;
  const SummedLayer& layer = layers[which];
  const int features = layer.features, f = blockIdx.x - layer.first_features;
  const float sum = f < features ? tap_sum(f, layer, warps) : layer.count;
  if (threadIdx.x) return;
  const long long side = features + 1, place = SQUARED ? f : features * side + f;
  const float old = layer.beta == 0.0f ? 0.0f : layer.beta * layer.out[place];
  layer.out[place] = layer.alpha * sum + old;
  if (!SQUARED) layer.out[f * side + features] = layer.alpha * sum + old;
}
