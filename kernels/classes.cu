// Softmax distributions: samples, by inversion (the number of classes whose cumulative weight is at
// most uniform * total), and the cross-entropy of class ids with its gradient.
//
//   logits    (outer, classes, inner), contiguous; a row is along the middle axis
//   uniforms  (outer, inner) float64 in [0, 1)
//   ids       (outer, inner) int64
//   terms     (outer, inner)
//   gradient  (outer, classes, inner)
//
// Of samples, weights are exp(logit - largest) in float64, as in the reference code. Sums differ from the
// reference by rounding, so the ids are equal unless a uniform lies within 1e-13 of a boundary.
//
//   LANES 32   a warp has one row: grid ceil(rows / 8), block 256
//   LANES 1    a thread has one row, adjacent threads adjacent rows: grid ceil(rows / 256)
#ifndef LANES
#define LANES 32
#endif

#if LANES == 32
__device__ __forceinline__ double running_sum(double value, int lane) {
  for (int distance = 1; distance < 32; distance *= 2) {
    const double before = __shfl_sync(0xffffffffu, value, lane - distance & 31);
    if (lane >= distance) value += before;
  }
  return value;
}
#endif

// Returns the number of cumulative weights that are at most `bound`; `carry` receives the total.
__device__ __forceinline__ long long count_below(const scalar* __restrict__ row, long long inner,
                                                 int classes, float largest, int lane, double bound,
                                                 double* carry) {
  long long below = 0;
  *carry = 0.0;
  for (int first = 0; first < classes; first += LANES) {
    const int c = first + lane;
    const double weight = c < classes ? exp((double)(read(row + c * inner) - largest)) : 0.0;
#if LANES == 32
    const double sum = *carry + running_sum(weight, lane);
    // The lane of the last class, not lane 31: its sum has another order and may round to less.
    *carry = __shfl_sync(0xffffffffu, sum, min(31, classes - 1 - first));
#else
    const double sum = *carry += weight;
#endif
    below += c < classes && sum <= bound;
  }
  return below;
}

extern "C" __global__ void __launch_bounds__(256, 2)
draw_classes(const scalar* __restrict__ logits, const double* __restrict__ uniforms,
             long long* __restrict__ ids, long long rows, long long inner, int classes) {
  const int lane = threadIdx.x % LANES;
  const long long index = (blockIdx.x * 256LL + threadIdx.x) / LANES;
  if (index >= rows) return;  // all lanes of a row return
  const scalar* row = logits + index / inner * classes * inner + index % inner;
  float largest = read(row);
  for (int c = lane; c < classes; c += LANES) largest = fmaxf(largest, read(row + c * inner));
#if LANES == 32
  for (int distance = 16; distance; distance /= 2)
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
#endif
  double total;
  count_below(row, inner, classes, largest, lane, -1.0, &total);
  long long below = count_below(row, inner, classes, largest, lane, uniforms[index] * total, &total);
#if LANES == 32
  for (int distance = 16; distance; distance /= 2)
    below += __shfl_down_sync(0xffffffffu, below, distance);
#endif
  if (lane == 0) ids[index] = below;
}

// terms <- -log p[id], gradient <- p, minus one at the id. The sum of all classes but the largest one
// keeps the digits of 1 - p near p = 1; see losses/categorical.py.
extern "C" __global__ void __launch_bounds__(256, 2)
cross_entropy(const scalar* __restrict__ logits, const long long* __restrict__ ids,
              float* __restrict__ terms, float* __restrict__ gradient, long long rows,
              long long inner, int classes) {
  const int lane = threadIdx.x % LANES;
  const long long index = (blockIdx.x * 256LL + threadIdx.x) / LANES;
  if (index >= rows) return;  // all lanes of a row return
  const long long first = index / inner * classes * inner + index % inner;
  float top = 0.0f;
  int largest = classes;  // the first largest logit
  for (int c = lane; c < classes; c += LANES) {
    const float z = read(logits + first + c * inner);
    if (z > top || largest == classes) {
      top = z;
      largest = c;
    }
  }
#if LANES == 32
  for (int distance = 16; distance; distance /= 2) {
    const float z = __shfl_xor_sync(0xffffffffu, top, distance);
    const int c = __shfl_xor_sync(0xffffffffu, largest, distance);
    if (c < classes && (largest == classes || z > top || (z == top && c < largest))) {
      top = z;
      largest = c;
    }
  }
#endif
  float rest = 0.0f;
  for (int c = lane; c < classes; c += LANES)
    if (c != largest) rest += expf(read(logits + first + c * inner) - top);
#if LANES == 32
  for (int distance = 16; distance; distance /= 2)
    rest += __shfl_xor_sync(0xffffffffu, rest, distance);
#endif
  const int id = (int)ids[index];
  const float total = 1.0f + rest;
  for (int c = lane; c < classes; c += LANES) {
    const float z = read(logits + first + c * inner);
    const float p = c == largest ? 1.0f / total : expf(z - top) / total;
    gradient[first + c * inner] = c != id ? p : c == largest ? -rest / total : p - 1.0f;
    if (c == id) terms[index] = log1pf(rest) - (z - top);
  }
}
