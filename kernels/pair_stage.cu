// Images as pairs of half-precision numbers, channels last: the operands of pair_products.cu.
//
// A number x of channel c becomes x 2^s(c) = high + low + error with two half-precision numbers. The
// exponent s(c) puts the largest magnitude of the channel into [2^14, 2^15). The error is at most 2^-22
// of x, or 2^-40 of the largest magnitude of the channel: a pair holds 22 bits, as two TF32 numbers do.
//
//   layers      images of several layers, whose numbers of channels are multiples of 64
//   peaks       (pieces, channels) of a layer: bits of the largest magnitude in each run of images
//   exponents   (channels) of a layer: s
//   pairs       (images, pixels, 2, channels) of a layer: all high parts of a pixel, then all low parts
//
// A launch has the blocks of all layers, one layer after another. No atomics. NaN and infinity give NaN
// in the products of their channel.

// Images of a layer, and their pairs.
struct StagedLayer {
  const void* x;          // images of any strides
  unsigned* peaks;        // (pieces, channels)
  int* exponents;         // (channels)
  unsigned short* pairs;  // (images, pixels, 2, channels)
  Images images;
  int pieces, length;            // of peaks: their number, and images of one
  int first_peaks, first_pairs;  // the first block of find_peaks and of write_pairs
};

#ifndef CUDA_ON_CPU
// Two numbers as half-precision numbers, to nearest; `low` is in the low bits.
__device__ __forceinline__ unsigned two_halves(float low, float high) {
  unsigned short parts[2];
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(parts[0]) : "f"(low));
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(parts[1]) : "f"(high));
  return parts[0] | (unsigned)parts[1] << 16;
}
#endif

__device__ __forceinline__ long long place_of_pixel(int pixel, const Images& g) {
  long long place = 0;
  #pragma unroll
  for (int axis = 2; axis >= 0; --axis) {
    place += pixel % g.shape[axis] * g.pixel_strides[axis];
    pixel /= g.shape[axis];
  }
  return place;
}

// peaks <- largest magnitudes. Block 256: a warp reads one channel of the images of a piece. The blocks of
// a layer are (pieces, channels / 8).
extern "C" __global__ void __launch_bounds__(256)
find_peaks(const StagedLayer* __restrict__ layers, int count) {
  int which = 0;
  while (which + 1 < count && (int)blockIdx.x >= layers[which + 1].first_peaks) ++which;
  const StagedLayer& layer = layers[which];
  const Images& g = layer.images;
  const int block = blockIdx.x - layer.first_peaks, across = g.channels / 8, piece = block / across;
  const int channel = block % across * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
  const int pixels = g.shape[0] * g.shape[1] * g.shape[2];
  const int begin = piece * layer.length, end = min(begin + layer.length, g.images);
  const bool flat = (g.pixel_strides[2] == 1 || g.shape[2] == 1) &&
                    (g.pixel_strides[1] == g.shape[2] || g.shape[1] == 1) &&
                    (g.pixel_strides[0] == (long long)g.shape[1] * g.shape[2] || g.shape[0] == 1);
  unsigned most = 0;
  for (int image = begin; image < end; ++image) {
    const scalar* own = (const scalar*)layer.x + image * g.image_stride + channel * g.channel_stride;
    #pragma unroll 4
    for (int p = lane; p < pixels; p += 32) {
      const float found = read(own + (flat ? p : place_of_pixel(p, g)));
      most = max(most, __float_as_uint(found) & 0x7fffffffu);
    }
  }
  #pragma unroll
  for (int distance = 16; distance; distance /= 2)
    most = max(most, __shfl_xor_sync(0xffffffffu, most, distance));
  if (lane == 0) layer.peaks[piece * g.channels + channel] = most;
}

// pairs, exponents <- x, peaks. Block 256: 64 pixels of 64 channels. The blocks of a layer are (images,
// channels / 64, ceil(pixels / 64)).
extern "C" __global__ void __launch_bounds__(256)
write_pairs(const StagedLayer* __restrict__ layers, int count) {
  __shared__ float tile[64][65], scales[64];
  int which = 0;
  while (which + 1 < count && (int)blockIdx.x >= layers[which + 1].first_pairs) ++which;
  const StagedLayer& layer = layers[which];
  const Images& g = layer.images;
  const int pixels = g.shape[0] * g.shape[1] * g.shape[2], thread = threadIdx.x;
  const int across = g.channels / 64, runs = (pixels + 63) / 64;
  int block = blockIdx.x - layer.first_pairs;
  const int run = block % runs * 64;
  block /= runs;
  const int first = block % across * 64, image = block / across;
  if (thread < 64) {
    unsigned most = 0;
    for (int piece = 0; piece < layer.pieces; ++piece)
      most = max(most, layer.peaks[piece * g.channels + first + thread]);
    const int exponent = min(14 - ((int)(most >> 23) - 127), 126);
    scales[thread] = __uint_as_float((unsigned)(exponent + 127) << 23);
    if (run == 0 && image == 0) layer.exponents[first + thread] = exponent;
  }
  const scalar* own = (const scalar*)layer.x + image * g.image_stride + first * g.channel_stride +
                      place_of_pixel(min(run + thread % 64, pixels - 1), g);
  float found[16];
  #pragma unroll
  for (int i = 0; i < 16; ++i) found[i] = read(own + (thread / 64 + 4 * i) * g.channel_stride);
  __syncthreads();
  #pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int channel = thread / 64 + 4 * i;
    tile[thread % 64][channel] = found[i] * scales[channel];
  }
  __syncthreads();
  #pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = thread / 8 + 32 * i, column = thread % 8 * 8;
    if (run + row >= pixels) continue;
    int high[4], low[4];
    #pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float a = tile[row][column + 2 * j], b = tile[row][column + 2 * j + 1];
      const unsigned both = two_halves(a, b);
      high[j] = both;
      low[j] = two_halves(a - half_to_float((unsigned short)both),
                          b - half_to_float((unsigned short)(both >> 16)));
    }
    const long long pixel = image * (long long)pixels + run + row;
    unsigned short* place = layer.pairs + 2 * g.channels * pixel + first + column;
    *(int4*)place = int4{high[0], high[1], high[2], high[3]};
    *(int4*)(place + g.channels) = int4{low[0], low[1], low[2], low[3]};
  }
}
