// A block a token turns its heads into codes.
#include "fp8_heads.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    quantize(const char* from, long long from_token_stride, long long from_head_stride,
             const float* descale, char* to, long long to_token_stride,
             long long to_head_stride) {
  from += blockIdx.x * from_token_stride;
  to += blockIdx.x * to_token_stride;
  walk_items<COLUMNS / COUNT, 0, THREADS>(HEADS, [&](int item, const HeadWalk& walk) {
    const HeadColumns columns = {from + item * COUNT * int(sizeof(ELEMENT)), from_head_stride,
                                 to + item * COUNT, to_head_stride, descale};
    quantize_heads<ELEMENT, COUNT, IN_FLIGHT>(columns, walk, Plainly());
  });
}
