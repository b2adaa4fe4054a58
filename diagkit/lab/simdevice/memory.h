// Memory of the simulated accelerator: ordinary host memory that carries another device's name, counted per device.
//
// Two allocators: the device's, with a settable capacity and the counters that torch.accelerator reads, and the pinned
// one, which remembers its ranges because `is_pinned()` asks by address.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/version.h>

#include <array>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>

namespace sim {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 8;

inline c10::DeviceIndex& current_device() {
  // Per thread, as on a real accelerator: the autograd engine gives each device a thread of its own.
  static thread_local c10::DeviceIndex index = 0;
  return index;
}

inline void check_index(int64_t index) {
  TORCH_CHECK(index >= 0 && index < kDevices, "invalid device ordinal ", index, ": the simulated accelerator has ",
      kDevices, " devices");
}

inline std::string readable(size_t bytes) {
  if (bytes < (1u << 20)) return c10::str(bytes, " bytes");
  return c10::str(bytes >> 20, " MiB");
}

// What each device has handed out. A capacity of 0 means: no limit.
class Ledger {
 public:
  static Ledger& get() {
    static Ledger* ledger = new Ledger(); // leaked on purpose: tensors may outlive static destructors
    return *ledger;
  }
  void take(int device, size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& s = stats_[device];
    const size_t used = s.allocated_bytes[kAll].current;
    if (capacity_[device] != 0 && used + bytes > capacity_[device]) {
      ++s.num_ooms;
      std::string name = c10::get_privateuse1_backend();
      for (auto& letter : name) letter = static_cast<char>(std::toupper(letter));
      TORCH_CHECK_WITH(OutOfMemoryError, false, name, " out of memory (simulated): ", readable(bytes),
          " asked for on device ", device, ", where ", readable(capacity_[device] - used), " of ",
          readable(capacity_[device]), " are free");
    }
    s.allocation[kAll].increase(1);
    s.active[kAll].increase(1);
    for (auto* stat : {&s.allocated_bytes, &s.active_bytes, &s.reserved_bytes, &s.requested_bytes}) {
      (*stat)[kAll].increase(bytes);
    }
    ++s.num_device_alloc;
  }
  void give(int device, size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& s = stats_[device];
    s.allocation[kAll].decrease(1);
    s.active[kAll].decrease(1);
    for (auto* stat : {&s.allocated_bytes, &s.active_bytes, &s.reserved_bytes, &s.requested_bytes}) {
      (*stat)[kAll].decrease(bytes);
    }
    ++s.num_device_free;
  }
  void set_capacity(int64_t device, int64_t bytes) {
    check_index(device);
    TORCH_CHECK(bytes >= 0, "capacity must be at least 0 bytes (0: no limit), got ", bytes);
    std::lock_guard<std::mutex> lock(mutex_);
    capacity_[device] = static_cast<size_t>(bytes);
  }
  c10::CachingDeviceAllocator::DeviceStats stats(int device) {
    std::lock_guard<std::mutex> lock(mutex_);
    return stats_[device];
  }
  void reset(int device, bool peak) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& s = stats_[device];
    for (auto* stat :
        {&s.allocation, &s.active, &s.allocated_bytes, &s.active_bytes, &s.reserved_bytes, &s.requested_bytes}) {
      peak ? (*stat)[kAll].reset_peak() : (*stat)[kAll].reset_accumulated();
    }
    if (!peak) s.num_ooms = s.num_device_alloc = s.num_device_free = 0;
  }
  std::pair<size_t, size_t> info(int device) {
    std::lock_guard<std::mutex> lock(mutex_);
    // Without a limit the answer is the size of a common accelerator, so that ratios stay sensible.
    const size_t total = capacity_[device] ? capacity_[device] : size_t{64} << 30;
    const size_t used = stats_[device].allocated_bytes[kAll].current;
    return {total > used ? total - used : 0, total};
  }

 private:
  static constexpr size_t kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  std::mutex mutex_;
  std::array<c10::CachingDeviceAllocator::DeviceStats, kDevices> stats_{};
  std::array<size_t, kDevices> capacity_{};
};

// One allocation. `adopted` is set where a host operator made the bytes and the device took them over without a copy.
struct Block {
  void* data;
  size_t bytes;
  int device;
  c10::Storage adopted;
};

inline void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  Ledger::get().give(block->device, block->bytes);
  if (!block->adopted) c10::free_cpu(block->data);
  delete block;
}

inline c10::DataPtr device_bytes(size_t bytes, int device) {
  const c10::Device where(kType, static_cast<c10::DeviceIndex>(device));
  if (bytes == 0) return {nullptr, where};
  Ledger::get().take(device, bytes);
  void* data = c10::alloc_cpu(bytes);
  return {data, new Block{data, bytes, device, {}}, &free_block, where};
}

inline c10::DataPtr adopt_bytes(c10::Storage host, int device) {
  const c10::Device where(kType, static_cast<c10::DeviceIndex>(device));
  const size_t bytes = host.nbytes();
  if (bytes == 0) return {nullptr, where};
  Ledger::get().take(device, bytes);
  void* data = host.mutable_data();
  return {data, new Block{data, bytes, device, std::move(host)}, &free_block, where};
}

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 9
// No `torch.accelerator.memory_*` there: an allocator is just an allocator.
struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override { return device_bytes(bytes, current_device()); }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};
#else
struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override { return device_bytes(bytes, current_device()); }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex i) override {
    return Ledger::get().stats(i);
  }
  void resetAccumulatedStats(c10::DeviceIndex i) override { Ledger::get().reset(i, false); }
  void resetPeakStats(c10::DeviceIndex i) override { Ledger::get().reset(i, true); }
  // Not marked override: torch 2.9 does not know it yet.
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex i) { return Ledger::get().info(i); }
};
#endif

inline DeviceAllocator& device_allocator() {
  static auto* allocator = new DeviceAllocator();
  return *allocator;
}

class PinnedRanges {
 public:
  static PinnedRanges& get() {
    static auto* ranges = new PinnedRanges();
    return *ranges;
  }
  void add(void* data, size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    ends_[reinterpret_cast<uintptr_t>(data)] = reinterpret_cast<uintptr_t>(data) + bytes;
    total_ += bytes;
  }
  void remove(void* data) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto it = ends_.find(reinterpret_cast<uintptr_t>(data));
    if (it == ends_.end()) return;
    total_ -= it->second - it->first;
    ends_.erase(it);
  }
  bool holds(const void* data) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto it = ends_.upper_bound(reinterpret_cast<uintptr_t>(data));
    return it != ends_.begin() && reinterpret_cast<uintptr_t>(data) < (--it)->second;
  }
  size_t total() {
    std::lock_guard<std::mutex> lock(mutex_);
    return total_;
  }

 private:
  std::mutex mutex_;
  std::map<uintptr_t, uintptr_t> ends_; // first address -> one past the last
  size_t total_ = 0;
};

inline void free_pinned(void* data) {
  PinnedRanges::get().remove(data);
  c10::free_cpu(data);
}

// Whether non_blocking copies into pinned memory may be late (streams.h).
inline std::atomic<bool> deferring_copies{false};

struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, c10::Device(c10::kCPU)};
    void* data = c10::alloc_cpu(bytes);
    // Who reads a late copy's target too early must see the same stale bytes in every run.
    if (deferring_copies) std::memset(data, 0, bytes);
    PinnedRanges::get().add(data, bytes);
    return {data, data, &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

inline PinnedAllocator& pinned_allocator() {
  static auto* allocator = new PinnedAllocator();
  return *allocator;
}

} // namespace sim
