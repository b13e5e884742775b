#include <link.h>

#include "worker.h"

Module find_module(const Launch& launch) {
  struct Search {
    const char* code;
    Module found;
  } search{reinterpret_cast<const char*>(launch.entry), {}};
  launch.static_shared();  // makes the loader allocate it
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* data) {
        Search& search = *static_cast<Search*>(data);
        Module module;
        module.base = reinterpret_cast<const char*>(info->dlpi_addr);
        bool wanted = false;
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          const ElfW(Phdr)& header = info->dlpi_phdr[i];
          if (header.p_type == PT_TLS && info->dlpi_tls_data) {
            char* low = static_cast<char*>(info->dlpi_tls_data);
            module.shared = {low, low + header.p_memsz};
          }
          if (header.p_type != PT_LOAD) continue;
          char* low = reinterpret_cast<char*>(info->dlpi_addr + header.p_vaddr);
          const Range segment{low, low + header.p_memsz};
          module.readable.push_back(segment);
          if (header.p_flags & PF_W) module.writable.push_back(segment);
          wanted |= segment.holds(search.code);
        }
        if (wanted) search.found = std::move(module);
        return int(wanted);
      },
      &search);
  return search.found;
}
