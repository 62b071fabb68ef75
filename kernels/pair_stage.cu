// Images, or patches of images, as pairs of half-precision numbers: the operands of pair_products.cu.
//
// Feature f = tap * channels + channel at output o sees pixel o * stride + tap * dilation - begin, or zero
// outside the image. A layer whose images are staged has one tap, and its outputs are its pixels.
//
//   layers      images of several layers
//   peaks       (pieces, channels) of a layer: bits of the largest magnitude in each run of images
//   exponents   (features) of a layer: of the channels of the features
//   pairs       (images, outputs, 2, features) of a layer: all high parts of an output, then all low
//               parts. The features are padded with zeros to a multiple of 64.
//
// A launch has the blocks of all layers, one layer after another. No atomics. NaN and infinity give NaN
// in the products of their channel.

// Images of a layer, and their pairs.
struct StagedLayer {
  const void* x;     // images of any strides
  unsigned* peaks;   // (pieces, channels)
  int* exponents;    // (features)
  half_bits* pairs;  // (images, outputs, 2, features)
  Images images;
  Taps taps;
  Grid grid;
  int features;                  // with those of the padding
  int across;                    // 1 if channels are closer in memory than pixels
  int pieces, length;            // of peaks: their number, and images of one
  int first_peaks, first_pairs;  // the first block of find_peaks and of write_pairs
};

struct __align__(4 * sizeof(scalar)) FourScalars {
  scalar at[4];
};

__device__ __forceinline__ long long place_of_pixel(int pixel, const Images& g) {
  long long place = 0;
  #pragma unroll
  for (int axis = 2; axis >= 0; --axis) {
    place += pixel % g.shape[axis] * g.pixel_strides[axis];
    pixel /= g.shape[axis];
  }
  return place;
}

// The distance of adjacent pixels if all have one, else 0.
__device__ __forceinline__ long long step_of_pixels(const Images& g) {
  const int rows = g.shape[1] * g.shape[2];
  long long step = g.pixel_strides[2];
  if (g.shape[2] == 1) step = g.pixel_strides[1];
  if (rows == 1) step = g.pixel_strides[0];
  const bool one = (g.shape[2] == 1 || g.pixel_strides[2] == step) &&
                   (g.shape[1] == 1 || g.pixel_strides[1] == g.shape[2] * step) &&
                   (g.shape[0] == 1 || g.pixel_strides[0] == rows * step);
  return one ? step : 0;
}

__device__ __forceinline__ unsigned magnitude(const scalar* x) {
  return __float_as_uint(read(x)) & 0x7fffffffu;
}

// The largest magnitude that a lane sees of a channel of images whose pixels are along the lanes.
__device__ __forceinline__ unsigned peak_along(const scalar* own, const Images& g, int images,
                                               int lane) {
  const int pixels = g.shape[0] * g.shape[1] * g.shape[2];
  const long long step = step_of_pixels(g);
  // Four pixels at a time, if they and all images begin at a multiple of their size.
  const bool wide = step == 1 && pixels % 4 == 0 && g.image_stride % 4 == 0 &&
                    (unsigned long long)own % sizeof(FourScalars) == 0;
  const int fours = wide ? pixels / 4 : 0;
  unsigned most = 0;
  for (int image = 0; image < images; ++image, own += g.image_stride) {
    #pragma unroll 4
    for (int i = lane; i < fours; i += 32) {
      const FourScalars found = ((const FourScalars*)own)[i];
      #pragma unroll
      for (int j = 0; j < 4; ++j) most = max(most, magnitude(found.at + j));
    }
    if (wide) continue;
    if (step) {
      #pragma unroll 4
      for (int p = lane; p < pixels; p += 32) most = max(most, magnitude(own + p * step));
    } else {
      for (int p = lane; p < pixels; p += 32) most = max(most, magnitude(own + place_of_pixel(p, g)));
    }
  }
  return most;
}

// The same of every eighth pixel, counted image by image.
__device__ __forceinline__ unsigned peak_across(const scalar* own, const Images& g, int images,
                                                int first) {
  const int pixels = g.shape[0] * g.shape[1] * g.shape[2];
  const int more_images = 8 / pixels, more_pixels = 8 % pixels;
  const long long step = step_of_pixels(g);
  int image = first / pixels, pixel = first % pixels;
  unsigned most = 0;
  while (image < images) {
    // Four reads at a time hide the latency of memory.
    unsigned found[4];
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
      const long long place = step ? pixel * step : place_of_pixel(pixel, g);
      found[i] = image < images ? magnitude(own + image * g.image_stride + place) : 0;
      pixel += more_pixels;
      const int carry = pixel >= pixels;
      pixel -= carry ? pixels : 0;
      image += more_images + carry;
    }
    most = max(max(most, max(found[0], found[1])), max(found[2], found[3]));
  }
  return most;
}

// peaks <- largest magnitudes. Block 256: a warp reads one channel of the images of a piece, or a lane
// where channels are adjacent. The blocks of a layer are (pieces, ceil(channels / 8)), or / 32. With 48
// registers, sm_100 spills.
extern "C" __global__ void __launch_bounds__(256, 4)
find_peaks(const StagedLayer* __restrict__ layers, int count) {
  __shared__ unsigned of_warps[8][32];
  int which = 0;
  while (which + 1 < count && (int)blockIdx.x >= layers[which + 1].first_peaks) ++which;
  const StagedLayer& layer = layers[which];
  const Images& g = layer.images;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, width = layer.across ? 32 : 8;
  const int block = blockIdx.x - layer.first_peaks, blocks = (g.channels + width - 1) / width;
  const int piece = block / blocks, begin = piece * layer.length;
  const int channel = block % blocks * width + (layer.across ? lane : warp);
  const int images = min(layer.length, g.images - begin);
  const scalar* own =
      (const scalar*)layer.x + begin * g.image_stride + channel * g.channel_stride;
  unsigned most = 0;
  if (layer.across) {
    if (channel < g.channels) most = peak_across(own, g, images, warp);
    of_warps[warp][lane] = most;
    __syncthreads();
    for (int i = 0; i < 8; ++i) most = max(most, of_warps[i][lane]);
  } else {
    if (channel < g.channels) most = peak_along(own, g, images, lane);
    #pragma unroll
    for (int distance = 16; distance; distance /= 2)
      most = max(most, __shfl_xor_sync(0xffffffffu, most, distance));
  }
  if ((layer.across ? warp : lane) == 0 && channel < g.channels)
    layer.peaks[piece * g.channels + channel] = most;
}

// A feature or an output: the sum of both has an offset and a pixel.
struct Spot {
  long long offset;
  int pixels[3];
};

__device__ __forceinline__ Spot spot_at(long long offset, const int* pixels, bool counts,
                                        const Images& g) {
  Spot spot;
  spot.offset = offset;
  #pragma unroll
  for (int axis = 0; axis < 3; ++axis) {
    spot.pixels[axis] = pixels[axis];
    spot.offset += pixels[axis] * g.pixel_strides[axis];
  }
  if (!counts) spot.pixels[0] = NOWHERE;
  return spot;
}

// pairs, exponents <- x, peaks. Block 256: 64 outputs, counted image by image, with 64 features. The
// blocks of a layer are (ceil(images * outputs / 64), features / 64).
extern "C" __global__ void __launch_bounds__(256)
write_pairs(const StagedLayer* __restrict__ layers, int count) {
  __shared__ float tile[64][65], scales[64];
  __shared__ Spot features[64], outputs[64];
  int which = 0;
  while (which + 1 < count && (int)blockIdx.x >= layers[which + 1].first_pairs) ++which;
  const StagedLayer& layer = layers[which];
  const Images& g = layer.images;
  const int thread = threadIdx.x, across = layer.features / 64;
  const int block = blockIdx.x - layer.first_pairs;
  const int first = block % across * 64, run = block / across * 64;
  const int total = g.images * layer.grid.outputs[0] * layer.grid.outputs[1] * layer.grid.outputs[2];
  if (thread < 64) {
    const Feature feature = feature_at(first + thread, g, layer.taps, layer.grid);
    features[thread] = spot_at(feature.offset, feature.pixels, feature.pixels[0] != NOWHERE, g);
    unsigned most = 0;
    for (int piece = 0; piece < layer.pieces; ++piece)
      most = max(most, layer.peaks[piece * g.channels + (first + thread) % g.channels]);
    const int exponent = exponent_for(most);
    scales[thread] = power_of_two(exponent);
    if (run == 0) layer.exponents[first + thread] = exponent;
  } else if (thread < 128) {
    const int output = run + thread - 64;
    const Position position = position_at(output, total, g, layer.taps, layer.grid);
    outputs[thread - 64] = spot_at(position.offset, position.pixels, position.counts, g);
  }
  __syncthreads();
  // Adjacent threads read adjacent memory.
  const Spot near = layer.across ? features[thread % 64] : outputs[thread % 64];
  const Spot* others = layer.across ? outputs : features;
  float found[16];
  #pragma unroll
  for (int i = 0; i < 16; ++i) {
    const Spot& other = others[thread / 64 + 4 * i];
    bool inside = true;
    #pragma unroll
    for (int axis = 0; axis < 3; ++axis)
      inside &= (unsigned)(near.pixels[axis] + other.pixels[axis]) < (unsigned)g.shape[axis];
    found[i] = inside ? read((const scalar*)layer.x + near.offset + other.offset) : 0.0f;
  }
  #pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int a = thread % 64, b = thread / 64 + 4 * i;
    const int row = layer.across ? b : a, column = layer.across ? a : b;
    tile[row][column] = found[i] * scales[column];
  }
  __syncthreads();
  #pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = thread / 8 + 32 * i, column = thread % 8 * 8;
    if (run + row >= total) continue;
    int high[4], low[4];
    #pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float a = tile[row][column + 2 * j], b = tile[row][column + 2 * j + 1];
      high[j] = two_halves(a, b);
      low[j] = two_rests(high[j], a, b);
    }
    half_bits* place = layer.pairs + 2LL * layer.features * (run + row) + first + column;
    *(int4*)place = int4{high[0], high[1], high[2], high[3]};
    *(int4*)(place + layer.features) = int4{low[0], low[1], low[2], low[3]};
  }
}
