// A thread a vector or a few of one row, the lanes of blockDim.x side by side in it.
#include "gated.cuh"
#include "overlap.cuh"

constexpr int COUNT = VECTOR / int(sizeof(ELEMENT));

extern "C" __global__ void __launch_bounds__(THREADS)
    sigmoid_gate_vector(const ELEMENT* x, long long x_stride, const ELEMENT* gate,
                        long long gate_stride, ELEMENT* out, long long out_stride, long long rows,
                        int columns) {
  wait_for_previous_kernel();
  const long long row = blockIdx.x * (long long)blockDim.y + threadIdx.y;
  const int first = blockIdx.y * blockDim.x * IN_FLIGHT + threadIdx.x;
  if (row >= rows) return;
  x += row * x_stride;
  gate += row * gate_stride;
  out += row * out_stride;
  Vector<VECTOR> values[IN_FLIGHT], gates[IN_FLIGHT];
#pragma unroll
  for (int i = 0; i < IN_FLIGHT; ++i) {
    const int column = (first + int(blockDim.x) * i) * COUNT;
    if (column < columns) {
      values[i] = load_ahead<VECTOR>(x + column);
      gates[i] = load_ahead<VECTOR>(gate + column);
    }
  }
#pragma unroll
  for (int i = 0; i < IN_FLIGHT; ++i) {
    const int column = (first + int(blockDim.x) * i) * COUNT;
    if (column < columns) {
      float numbers[COUNT], factors[COUNT];
      unpack<ELEMENT, VECTOR>(values[i], numbers);
      unpack<ELEMENT, VECTOR>(gates[i], factors);
#pragma unroll
      for (int j = 0; j < COUNT; ++j) numbers[j] = gated(numbers[j], factors[j]);
      *reinterpret_cast<Vector<VECTOR>*>(out + column) = pack<ELEMENT, VECTOR>(numbers);
    }
  }
}
