// A thread a vector, the lanes of blockDim.x side by side in one of the block's blockDim.y rows.
#include "gated.cuh"
#include "overlap.cuh"

constexpr int COUNT = VECTOR / int(sizeof(ELEMENT));

extern "C" __global__ void __launch_bounds__(THREADS)
    sigmoid_gate_vector(const ELEMENT* x, long long x_stride, const ELEMENT* gate,
                        long long gate_stride, ELEMENT* out, long long out_stride, long long rows,
                        int columns) {
  wait_for_previous_kernel();
  const long long row = blockIdx.x * (long long)blockDim.y + threadIdx.y;
  const int column = (blockIdx.y * blockDim.x + threadIdx.x) * COUNT;
  if (row >= rows || column >= columns) return;
  float numbers[COUNT], gates[COUNT];
  const Vector<VECTOR> left = load_ahead<VECTOR>(x + row * x_stride + column);
  const Vector<VECTOR> right = load_ahead<VECTOR>(gate + row * gate_stride + column);
  unpack<ELEMENT, VECTOR>(left, numbers);
  unpack<ELEMENT, VECTOR>(right, gates);
#pragma unroll
  for (int i = 0; i < COUNT; ++i) numbers[i] = gated<ELEMENT>(numbers[i], gates[i]);
  auto* to = reinterpret_cast<Vector<VECTOR>*>(out + row * out_stride + column);
  *to = pack<ELEMENT, VECTOR>(numbers);
}
