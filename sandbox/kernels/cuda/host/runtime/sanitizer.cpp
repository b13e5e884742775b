// The functions that -fsanitize=thread and -fsanitize=undefined make a kernel call, in place of the
// sanitizers' own libraries. Those of the first kind announce every access to memory; those of the
// second are called when an operation has no defined meaning.
#include <cstring>

#include "checker.h"
#include "worker.h"

namespace {

void check(const void* address, size_t bytes, Access kind, const void* code) {
  Worker* self = worker;
  if (self && self->in_kernel() && self->checker && bytes)
    self->checker->access(address, bytes, kind, code);
}

// Data that the compiler passes.
struct Location {
  const char* file;
  uint32_t line, column;
};

struct Type {
  uint16_t kind, info;
  char name[1];
};

struct MisuseData {
  Location where;
  const Type* type;
  unsigned char log_alignment, use;
};

struct IndexData {
  Location where;
  const Type *array, *index;
};

struct ArithmeticData {
  Location where;
  const Type* type;
};

struct ShiftData {
  Location where;
  const Type *left, *right;
};

[[noreturn]] void fault(const Location& where, const std::string& what) {
  const char* slash = strrchr(where.file, '/');
  worker->fault(what + format(" at %s:%u", slash ? slash + 1 : where.file, where.line));
}

// An operand: its value if it fits a pointer, else its address.
std::string number(const Type* type, uintptr_t operand) {
  if (type->kind != 0) return "?";
  const unsigned bits = 1u << (type->info >> 1);
  const bool is_signed = type->info & 1;
  if (bits > 8 * sizeof operand) return "?";
  if (!is_signed) return std::to_string(operand);
  const int unused = int(8 * sizeof operand - bits);
  return std::to_string(intptr_t(operand << unused) >> unused);
}

[[noreturn]] void overflow(const ArithmeticData& data, uintptr_t a, const char* sign, uintptr_t b) {
  fault(data.where, "signed overflow: " + number(data.type, a) + sign + number(data.type, b) +
                        " does not fit " + data.type->name);
}

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))
#define CALLER __builtin_return_address(0)

#define ACCESSES(bytes)                                                                            \
  EXPORTED void __tsan_read##bytes(void* p) { check(p, bytes, Access::read, CALLER); }             \
  EXPORTED void __tsan_write##bytes(void* p) { check(p, bytes, Access::write, CALLER); }           \
  EXPORTED void __tsan_unaligned_read##bytes(void* p) { check(p, bytes, Access::read, CALLER); }   \
  EXPORTED void __tsan_unaligned_write##bytes(void* p) { check(p, bytes, Access::write, CALLER); } \
  EXPORTED void __tsan_read_write##bytes(void* p) {                                                \
    check(p, bytes, Access::read, CALLER), check(p, bytes, Access::write, CALLER);                 \
  }                                                                                                \
  EXPORTED void __tsan_unaligned_read_write##bytes(void* p) {                                      \
    check(p, bytes, Access::read, CALLER), check(p, bytes, Access::write, CALLER);                 \
  }
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)

EXPORTED void __tsan_init() {}
EXPORTED void __tsan_func_entry(void*) {}
EXPORTED void __tsan_func_exit() {}
EXPORTED void __tsan_read_range(void* p, size_t bytes) { check(p, bytes, Access::read, CALLER); }
EXPORTED void __tsan_write_range(void* p, size_t bytes) { check(p, bytes, Access::write, CALLER); }
EXPORTED void __tsan_vptr_update(void** p, void*) { check(p, 8, Access::write, CALLER); }
EXPORTED void __tsan_vptr_read(void** p) { check(p, 8, Access::read, CALLER); }

static void* copy(void* to, const void* from, size_t bytes, const void* code) {
  check(from, bytes, Access::read, code);
  check(to, bytes, Access::write, code);
  return memmove(to, from, bytes);
}

static void* fill(void* to, int value, size_t bytes, const void* code) {
  check(to, bytes, Access::write, code);
  return memset(to, value, bytes);
}

// Calls of the C library's functions, renamed by the linker (g++) or the compiler (clang++).
EXPORTED void* __wrap_memcpy(void* to, const void* from, size_t n) {
  return copy(to, from, n, CALLER);
}
EXPORTED void* __wrap_memmove(void* to, const void* from, size_t n) {
  return copy(to, from, n, CALLER);
}
EXPORTED void* __wrap_memset(void* to, int value, size_t n) { return fill(to, value, n, CALLER); }
EXPORTED void* __tsan_memcpy(void* to, const void* from, size_t n) {
  return copy(to, from, n, CALLER);
}
EXPORTED void* __tsan_memmove(void* to, const void* from, size_t n) {
  return copy(to, from, n, CALLER);
}
EXPORTED void* __tsan_memset(void* to, int value, size_t n) { return fill(to, value, n, CALLER); }

EXPORTED uint64_t sandbox_atomic_load(void* address, int bytes) {
  check(address, bytes, Access::atomic, CALLER);
  if (uintptr_t(address) % bytes)
    worker->fault(
        format("atomic on %d bytes at an address that is no multiple of %d", bytes, bytes));
  switch (bytes) {
    case 2:
      return __atomic_load_n(static_cast<uint16_t*>(address), __ATOMIC_RELAXED);
    case 4:
      return __atomic_load_n(static_cast<uint32_t*>(address), __ATOMIC_RELAXED);
    default:
      return __atomic_load_n(static_cast<uint64_t*>(address), __ATOMIC_RELAXED);
  }
}

template <typename Word>
static int swap_if(void* address, uint64_t* expected, uint64_t desired) {
  Word seen = Word(*expected);
  const bool done = __atomic_compare_exchange_n(static_cast<Word*>(address), &seen, Word(desired),
                                                false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED);
  *expected = seen;
  return done;
}

EXPORTED int sandbox_atomic_swap_if(void* address, int bytes, uint64_t* expected,
                                    uint64_t desired) {
  switch (bytes) {
    case 2:
      return swap_if<uint16_t>(address, expected, desired);
    case 4:
      return swap_if<uint32_t>(address, expected, desired);
    default:
      return swap_if<uint64_t>(address, expected, desired);
  }
}

EXPORTED void __ubsan_handle_type_mismatch_v1(MisuseData* data, uintptr_t address) {
  static const char* const uses[] = {"load from", "store to", "reference to", "member access of",
                                     "member call on"};
  const char* use = data->use < 5 ? uses[data->use] : "use of";
  if (!address) fault(data->where, format("%s a null pointer to %s", use, data->type->name));
  fault(data->where, format("%s %s at a misaligned address: %zu bytes past a multiple of %u", use,
                            data->type->name, size_t(address % (1u << data->log_alignment)),
                            1u << data->log_alignment));
}

EXPORTED void __ubsan_handle_out_of_bounds(IndexData* data, uintptr_t index) {
  fault(data->where,
        "index " + number(data->index, index) + " out of bounds of " + data->array->name);
}

EXPORTED void __ubsan_handle_add_overflow(ArithmeticData* data, uintptr_t a, uintptr_t b) {
  overflow(*data, a, " + ", b);
}

EXPORTED void __ubsan_handle_sub_overflow(ArithmeticData* data, uintptr_t a, uintptr_t b) {
  overflow(*data, a, " - ", b);
}

EXPORTED void __ubsan_handle_mul_overflow(ArithmeticData* data, uintptr_t a, uintptr_t b) {
  overflow(*data, a, " * ", b);
}

EXPORTED void __ubsan_handle_negate_overflow(ArithmeticData* data, uintptr_t a) {
  fault(data->where,
        "signed overflow: -(" + number(data->type, a) + ") does not fit " + data->type->name);
}

EXPORTED void __ubsan_handle_divrem_overflow(ArithmeticData* data, uintptr_t a, uintptr_t b) {
  if (b == 0) fault(data->where, "division of " + number(data->type, a) + " by zero");
  overflow(*data, a, " / ", b);
}

EXPORTED void __ubsan_handle_shift_out_of_bounds(ShiftData* data, uintptr_t a, uintptr_t b) {
  fault(data->where, "shift of a " + std::string(data->left->name) + " (" + number(data->left, a) +
                         ") by " + number(data->right, b) + " bits");
}
