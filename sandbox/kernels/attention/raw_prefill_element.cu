// A warp a query and head, a key at a time.
#include "numbers.cuh"
#include "online_softmax.cuh"
#include "paged.cuh"
#include "strides.cuh"
#include "warp_row.cuh"

constexpr int WARPS = THREADS / 32;

// An element of a row of Width of them in each place.
template <int Width> __device__ __forceinline__ WarpRow<Width> head_row(const ELEMENT* elements) {
  WarpRow<Width> row;
  row.each([&](int column, float(&to)[1]) { to[0] = number(elements[column]); });
  return row;
}

// The keys first <= key < end that query `token` sees.
struct Seen {
  long long first, end;
};

__device__ __forceinline__ Seen seen_by(long long token, const Requests& queries,
                                        const int* cu_seqlens_k, long long key_count) {
  const int request = owner_of(token, queries);
  if (request < 0 || request >= queries.count) return {0, 0};
  const long long first = cu_seqlens_k[request];
  long long end = cu_seqlens_k[request + 1];
  if (CAUSAL) end -= queries.bounds[request + 1] - 1 - token;
  return {max(first, 0LL), min(end, key_count)};
}

extern "C" __global__ void __launch_bounds__(THREADS)
    prefill_attention_element(const ELEMENT* q, const TokenStrides q_strides, const ELEMENT* k,
                              const TokenStrides k_strides, const ELEMENT* v,
                              const TokenStrides v_strides, const int* cu_seqlens_q,
                              const int* cu_seqlens_k, int request_count, OUT* out,
                              const TokenStrides out_strides, float* out_lse,
                              const TokenStrides lse_strides, float from_natural,
                              float softmax_scale, const float* q_descale, const float* k_descale,
                              const float* v_descale, long long tokens, long long key_count,
                              int heads) {
  const long long token = blockIdx.x / heads * (long long)WARPS + threadIdx.x / 32;
  const int head = blockIdx.x % heads;
  if (token >= tokens) return;
  const Seen seen = seen_by(token, {cu_seqlens_q, request_count, nullptr}, cu_seqlens_k, key_count);
  const float scale = softmax_scale * descale_of(q_descale) * descale_of(k_descale);

  OnlineSoftmax softmax;
  WarpRow<VALUE_WIDTH> sum;
  if (seen.first < seen.end) {
    const WarpRow<WIDTH> query = head_row<WIDTH>(q + q_strides(token, head));
#pragma unroll 1
    for (long long key = seen.first; key < seen.end; ++key) {
      const float score = dot(query, head_row<WIDTH>(k + k_strides(key, head))) * scale;
      float factor;
      const float weight = softmax.next(score, factor);
      sum.add(factor, weight, head_row<VALUE_WIDTH>(v + v_strides(key, head)));
    }
  }

  const float share = softmax.inverse() * descale_of(v_descale);
  out += out_strides(token, head);
  sum.each([&](int column, const float(&value)[1]) {
    out[column] = from_float<OUT>(value[0] * share);
  });
  if ((threadIdx.x & 31) == 0 && out_lse != nullptr) {
    out_lse[lse_strides(token, head)] = softmax.lse() * from_natural;
  }
}
