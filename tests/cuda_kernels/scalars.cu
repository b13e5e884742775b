// Every kind of parameter, written out as doubles.
struct Pair {
  float first;
  long long second;
};

extern "C" __global__ void scalars(double* out, int i, unsigned int u, long long l,
                                   unsigned long long ul, float f, double d, bool b, short s,
                                   const __grid_constant__ Pair pair,
                                   const float* __restrict__ maybe) {
  out[0] = i;
  out[1] = u;
  out[2] = double(l);
  out[3] = double(ul);
  out[4] = f;
  out[5] = d;
  out[6] = b ? 1.0 : 0.0;
  out[7] = s;
  out[8] = pair.first;
  out[9] = double(pair.second);
  out[10] = maybe == nullptr ? -1.0 : maybe[0];
}
