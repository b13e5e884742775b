// How the runtime calls a kernel: SANDBOX_KERNEL(name) ends a translation unit. Written with names
// that no kernel's macros can change.
#pragma once

#define SANDBOX_EXPORTED extern "C" __attribute__((visibility("default")))
#define SANDBOX_UNCHECKED __attribute__((no_sanitize("thread"), no_sanitize("undefined")))

namespace sandbox {

template <typename T>
struct Parameter {
  alignas(T) unsigned char bytes[sizeof(T)];

  SANDBOX_UNCHECKED explicit Parameter(const void* from) {
    for (size_t i = 0; i < sizeof(T); ++i) bytes[i] = static_cast<const unsigned char*>(from)[i];
  }
  SANDBOX_UNCHECKED T& get() { return *reinterpret_cast<T*>(bytes); }
};

template <typename... T, size_t... i>
SANDBOX_UNCHECKED void call(void (*kernel)(T...), void** arguments, std::index_sequence<i...>) {
  kernel(Parameter<T>(arguments[i]).get()...);
}

template <typename... T>
SANDBOX_UNCHECKED void call(void (*kernel)(T...), void** arguments) {
  call(kernel, arguments, std::index_sequence_for<T...>());
}

template <typename... T>
int parameter_bytes(void (*)(T...), int index) {
  const int bytes[] = {int(sizeof(T))..., 0};
  return bytes[index];
}

inline char* inside_shared() {
  static thread_local char anchor;
  return &anchor;
}

}  // namespace sandbox

#define SANDBOX_KERNEL(sandbox_name)                                                \
  SANDBOX_EXPORTED SANDBOX_UNCHECKED void sandbox_entry(void** sandbox_arguments) { \
    ::sandbox::call(sandbox_name, sandbox_arguments);                               \
  }                                                                                 \
  SANDBOX_EXPORTED int sandbox_parameter_bytes(int sandbox_index) {                 \
    return ::sandbox::parameter_bytes(sandbox_name, sandbox_index);                 \
  }                                                                                 \
  SANDBOX_EXPORTED char* sandbox_static_shared() { return ::sandbox::inside_shared(); }
