// The simulated accelerator, one translation unit: loading it registers allocators, guard, hooks and kernels; the
// operator diagkit_sim::start then hands every operator that has a CPU kernel to the host, which must wait until
// PyTorch's own registrations are complete.
#include "autocast.h"
#include "kernels.h"

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace sim {
namespace {

const bool registered = [] {
  c10::SetAllocator(kType, &device_allocator());
  at::setHostAllocator(kType, &pinned_allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

std::vector<torch::Library>& libraries() {
  static auto* kept = new std::vector<torch::Library>(); // registrations last as long as their Library
  return *kept;
}

// Operators with a kernel of their own on the CPU run exactly that kernel here. Without this most would reach it too,
// but through composites that allocate first (twice the dispatches) or that compute differently (native_layer_norm).
bool runs_on_host(const c10::OperatorHandle& op) {
  if (op.hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) return false;
  if (op.operator_name().name == "aten::_foreach_copy_") return false; // copies across devices: index by index
  return op.hasKernelForDispatchKey(c10::DispatchKey::CPU) ||
         op.operator_name().name.compare(0, 14, "aten::_foreach") == 0;
}

int64_t start() {
  auto& dispatcher = c10::Dispatcher::singleton();
  if (!libraries().empty()) return 0;
#ifdef __GLIBC__
  // Backward runs on the device's own thread. With an arena for each thread, glibc returns its large blocks to the
  // kernel at every free, and page faults cost a step 5 % (measured at width 512, batch 32).
  mallopt(M_ARENA_MAX, 1);
#endif
  auto& kept = libraries();
  kept.reserve(3);
  // torch 2.9 has no fallback for these two keys, newer versions do; fsdp:: and _c10d_functional:: operators need them.
  for (const auto key : {c10::DispatchKey::AutogradPrivateUse1, c10::DispatchKey::AutocastPrivateUse1}) {
    kept.emplace_back(torch::Library::IMPL, "_", key, __FILE__, __LINE__);
    if (!dispatcher.hasBackendFallbackForDispatchKey(key)) kept.back().fallback(torch::CppFunction::makeFallthrough());
  }
  kept.emplace_back(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  int64_t count = 0;
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.compare(0, 6, "aten::") != 0) continue;
    const auto op = dispatcher.findOp(name);
    if (!op || !runs_on_host(*op)) continue;
    const std::string full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    kept.back().impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
    ++count;
  }
  return count;
}

} // namespace

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

} // namespace sim

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&sim::run_on_host>());
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  sim::register_kernels(m);
}
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  sim::register_autocast(m);
}
TORCH_LIBRARY(diagkit_sim, m) {
  m.def("start() -> int", &sim::start);
  m.def("device_count() -> int", []() -> int64_t { return sim::kDevices; });
  m.def("set_capacity(int device, int bytes) -> ()",
      [](int64_t device, int64_t bytes) { sim::Ledger::get().set_capacity(device, bytes); });
  m.def("set_deferred_copies(bool on) -> ()", [](bool on) { sim::deferring_copies = on; });
  m.def("default_generator(int device) -> Generator?",
      [](int64_t device) { return sim::default_generator(static_cast<c10::DeviceIndex>(device)); });
  m.def("pinned_bytes() -> int", []() -> int64_t { return static_cast<int64_t>(sim::PinnedRanges::get().total()); });
}
