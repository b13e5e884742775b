// A block a row, a thread an element.
#include "gated.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    sigmoid_gate_element(const ELEMENT* x, long long x_stride, const ELEMENT* gate,
                         long long gate_stride, ELEMENT* out, long long out_stride, int columns) {
  x += blockIdx.x * x_stride;
  gate += blockIdx.x * gate_stride;
  out += blockIdx.x * out_stride;
  for (int i = threadIdx.x; i < columns; i += THREADS) {
    out[i] = from_float<ELEMENT>(gated<ELEMENT>(to_float(x[i]), to_float(gate[i])));
  }
}
