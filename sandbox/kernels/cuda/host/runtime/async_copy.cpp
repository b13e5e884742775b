// cp.async: a copy is done only when its thread waits for it, so that a missing wait shows.
#include <cstring>

#include "checker.h"
#include "worker.h"

extern "C" {

void sandbox_async_copy(void* shared, const void* global, int bytes, int source_bytes,
                        SandboxSite site) {
  Worker& self = *worker;
  if (uintptr_t(shared) % bytes || uintptr_t(global) % bytes)
    self.fault(describe(site) +
               format(": an address is no multiple of the %d bytes to copy", bytes));
  if (source_bytes < 0 || source_bytes > bytes)
    self.fault(describe(site) + format(": %d of %d bytes from the source", source_bytes, bytes));
  if (self.checker)
    self.checker->async_copy(shared, global, bytes, source_bytes, __builtin_return_address(0));
  AsyncCopies& copies = self.copies();
  copies.pending.push_back({static_cast<char*>(shared), static_cast<const char*>(global), bytes,
                            source_bytes, copies.groups});
}

void sandbox_async_commit() { ++worker->copies().groups; }

void sandbox_async_wait(int groups_left) {
  Worker& self = *worker;
  AsyncCopies& copies = self.copies();
  auto copy = copies.pending.begin();
  for (; copy != copies.pending.end() && copy->group < copies.groups - groups_left; ++copy) {
    if (self.checker) self.checker->async_done(copy->shared, copy->bytes);
    memcpy(copy->shared, copy->global, copy->source_bytes);
    memset(copy->shared + copy->source_bytes, 0, copy->bytes - copy->source_bytes);
  }
  copies.pending.erase(copies.pending.begin(), copy);
}
}
