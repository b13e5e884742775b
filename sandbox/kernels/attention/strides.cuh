// Where the rows of arrays with heads stand, in elements.
#pragma once

// [tokens, heads, ...]
struct TokenStrides {
  long long token, head;
  __device__ __forceinline__ long long operator()(long long t, int h) const {
    return t * token + h * head;
  }
};

// [requests, tokens of a request, heads, ...]
struct RequestStrides {
  long long request, token, head;
  __device__ __forceinline__ long long operator()(int b, int t, int h) const {
    return b * request + t * token + h * head;
  }
};
