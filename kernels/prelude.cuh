// Common part of every kernel source. No #include anywhere: the compiler at run time has no headers.
//
// INPUT is the type of `scalar`: 0 float, 1 half, 2 bfloat16, 3 double. Kernels with sums in float do
// not support double.
#ifndef INPUT
#define INPUT 0
#endif

#ifndef CUDA_ON_CPU
__device__ __forceinline__ float half_to_float(unsigned short bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
#endif

__device__ __forceinline__ float bfloat_to_float(unsigned short bits) {
  return __uint_as_float((unsigned)bits << 16);
}

#if INPUT == 0
typedef float scalar;
__device__ __forceinline__ float read(const scalar* x) { return *x; }
#elif INPUT == 1
typedef unsigned short scalar;
__device__ __forceinline__ float read(const scalar* x) { return half_to_float(*x); }
#elif INPUT == 2
typedef unsigned short scalar;
__device__ __forceinline__ float read(const scalar* x) { return bfloat_to_float(*x); }
#else
typedef double scalar;
#endif

// Sum over the threads of a warp, returned in lane 0; the order is fixed.
__device__ __forceinline__ float warp_sum(float value) {
  for (int distance = 16; distance; distance /= 2)
    value += __shfl_down_sync(0xffffffffu, value, distance);
  return value;
}

// Sum over a block of 256 threads, returned in thread 0; the order is fixed.
__device__ __forceinline__ float block_sum(float value, float* warps) {
  value = warp_sum(value);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  float total = 0.0f;
  if (threadIdx.x == 0)
    for (int warp = 0; warp < (int)blockDim.x / 32; ++warp) total += warps[warp];
  __syncthreads();
  return total;
}

// -- triangles: tiles of 32 x 32 entries; tiles of the lower triangle count row by row

struct Tile {
  int row, column;
};

__device__ __forceinline__ Tile lower_tile(int index) {
  int row = (int)((sqrtf(8.0f * index + 1.0f) - 1.0f) * 0.5f);
  while ((long long)(row + 1) * (row + 2) / 2 <= index) ++row;  // the root is rounded
  while ((long long)row * (row + 1) / 2 > index) --row;
  return Tile{row, index - (int)((long long)row * (row + 1) / 2)};
}

// -- geometry: three spatial axes; missing axes come first, with one pixel, one tap, one output --

// Images of any strides, in elements.
struct Images {
  long long image_stride, channel_stride, pixel_strides[3];
  int images, channels, shape[3];
};
struct Taps {
  int kernel[3], strides[3], dilations[3];
};
// A box of output positions, counted image by image in row-major order. The first tap of output zero
// sees pixel -begin.
struct Grid {
  int begins[3], outputs[3];
};

// The pixel that a tap sees from output zero, for each axis.
__device__ __forceinline__ void first_pixels(int tap, const Taps& t, const Grid& grid, int* pixels) {
  #pragma unroll
  for (int axis = 2; axis >= 0; --axis) {
    pixels[axis] = tap % t.kernel[axis] * t.dilations[axis] - grid.begins[axis];
    tap /= t.kernel[axis];
  }
}

#define NOWHERE (-(1 << 29))  // a pixel outside any image

// Offset and pixel of a feature, relative to an output position.
struct Feature {
  long long offset;  // of its channel
  int pixels[3];     // of its tap
};

__device__ __forceinline__ Feature feature_at(int f, const Images& g, const Taps& t,
                                              const Grid& grid) {
  Feature found;
  const int tap = f / g.channels;
  found.offset = (long long)(f % g.channels) * g.channel_stride;
  first_pixels(tap, t, grid, found.pixels);
  if (tap >= t.kernel[0] * t.kernel[1] * t.kernel[2]) found.pixels[0] = NOWHERE;
  return found;
}

// One output position: the offset of its image, and the pixel its first tap would see at begin 0.
struct Position {
  long long offset;
  int pixels[3];
  bool counts;
};

__device__ __forceinline__ Position position_at(int p, int end, const Images& g, const Taps& t,
                                                const Grid& grid) {
  Position found;
  found.counts = p < end;
  int rest = found.counts ? p : 0;
  #pragma unroll
  for (int axis = 2; axis >= 0; --axis) {
    found.pixels[axis] = rest % grid.outputs[axis] * t.strides[axis];
    rest /= grid.outputs[axis];
  }
  found.offset = rest * g.image_stride;
  return found;
}

// Returns the offset of the pixel that a feature sees at a position; -1 if it is outside the image.
__device__ __forceinline__ long long seen(const Feature& f, const Position& p, const Images& g) {
  long long offset = f.offset + p.offset;
  bool inside = p.counts;
  #pragma unroll
  for (int axis = 0; axis < 3; ++axis) {
    int pixel = p.pixels[axis] + f.pixels[axis];
    inside = inside && (unsigned)pixel < (unsigned)g.shape[axis];
    offset += pixel * g.pixel_strides[axis];
  }
  return inside ? offset : -1;
}

// What a block computes: products of one or two rows of tiles with one or two columns, over the positions
// [begin, end) of a grid.
struct Job {
  int layer, grid, begin, end;
  int tiles[4];  // two of the rows, two of the columns; a kernel of fewer tiles reads fewer
  int parts[4];  // of the products, row by row; -1 if it is not wanted
};

// -- work on groups of channels, in pieces

struct Work {
  long long units;  // number of images or positions
  long long length; // units of a piece
  int groups, rows, columns, ones;
};
