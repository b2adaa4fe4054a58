// What PyTorch asks an accelerator about outside of operators: devices, generators, pinned memory, storage resizing.
#pragma once

#include "streams.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>

namespace sim {

// A generator whose state looks like an accelerator's: 16 bytes, seed and offset. Numbers come from the CPU's engine,
// seeded afresh for each operator from (seed, offset): the first draw after manual_seed equals the CPU's.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(c10::DeviceIndex device)
      : c10::GeneratorImpl(c10::Device(kType, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  static c10::DeviceType device_type() { return kType; }
  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16 && state.dtype() == at::kByte,
        "a random state of the simulated accelerator is 16 bytes (seed and offset), got ", state.numel());
    const auto* words = static_cast<const uint64_t*>(state.data());
    seed_ = words[0];
    offset_ = words[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    at::Tensor state = at::detail::empty_cpu({16}, at::kByte);
    auto* words = static_cast<uint64_t*>(state.mutable_data_ptr());
    words[0] = seed_;
    words[1] = offset_;
    return state.getIntrusivePtr();
  }
  // The CPU generator for the next operator; moves the offset as a counter-based generator does.
  at::Generator next_host_generator() {
    std::lock_guard<std::mutex> lock(mutex_);
    uint64_t mixed = seed_;
    if (offset_ != 0) { // splitmix64: neighbouring offsets give unrelated streams
      mixed += offset_ * 0x9E3779B97F4A7C15ull;
      mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9ull;
      mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBull;
      mixed ^= mixed >> 31;
    }
    offset_ += 4;
    return at::detail::createCPUGenerator(mixed);
  }

 private:
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }
  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

inline const at::Generator& default_generator(c10::DeviceIndex index) {
  static auto* generators = [] {
    auto* all = new std::vector<at::Generator>();
    for (c10::DeviceIndex i = 0; i < kDevices; ++i) all->push_back(at::make_generator<Generator>(i));
    return all;
  }();
  const auto wanted = index < 0 ? current_device() : index;
  check_index(wanted);
  return (*generators)[wanted];
}

inline void resize_storage(c10::StorageImpl* storage, size_t bytes) {
  TORCH_CHECK(storage->resizable(), "this storage cannot be resized");
  const int device = storage->device().index();
  c10::DataPtr fresh = device_bytes(bytes, device);
  const size_t kept = std::min(bytes, storage->nbytes());
  if (kept != 0) std::memcpy(fresh.get(), storage->data(), kept);
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(bytes);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex i) const override {
    check_index(i);
    current_device() = i;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex i) const override {
    const auto before = current_device();
    setCurrentDevice(i);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex i) const override {
    return i < 0 ? current_device() : exchangeDevice(i);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex i) const override { return default_generator(i); }
  at::Generator getNewGenerator(c10::DeviceIndex i) const override {
    return at::make_generator<Generator>(i < 0 ? current_device() : i);
  }
  at::Device getDeviceFromPtr(void*) const override { return {kType, current_device()}; }
  bool isPinnedPtr(const void* data) const override { return PinnedRanges::get().holds(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), bytes);
  }
};

} // namespace sim
