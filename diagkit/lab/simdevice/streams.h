// Streams, events and deferred copies.
//
// Kernels of the simulated accelerator finish before they return, so a stream needs no queue, only an identity. The one
// thing that may be late is a non_blocking copy into pinned host memory: with deferred copies switched on its bytes
// arrive when the host synchronises with the stream, which makes "read too early" a fact instead of a race.
#pragma once

#include "memory.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <chrono>

namespace sim {

struct PendingCopy {
  at::Tensor to;   // an alias of the pinned host tensor: keeps it alive
  at::Tensor from; // the source's bytes as they were when the copy was enqueued
  c10::DeviceIndex device;
  std::vector<c10::StreamId> streams; // waiting for any of these completes the copy
  uint64_t ticket;
};

class CopyQueue {
 public:
  static CopyQueue& get() {
    static auto* queue = new CopyQueue();
    return *queue;
  }
  void add(const at::Tensor& to, at::Tensor from, const c10::Stream& stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    pending_.push_back({to.alias(), std::move(from), stream.device_index(), {stream.id()}, ++ticket_});
    waiting_ = pending_.size();
  }
  uint64_t ticket() {
    std::lock_guard<std::mutex> lock(mutex_);
    return ticket_;
  }
  // Completes what `wanted` selects, in order; says whether anything was still on its way.
  template <typename F>
  bool complete(F wanted) {
    if (waiting_ == 0) return false;
    std::lock_guard<std::mutex> lock(mutex_);
    at::AutoDispatchBelowADInplaceOrView below;
    std::vector<PendingCopy> rest;
    for (auto& copy : pending_) {
      if (wanted(copy)) {
        copy.to.copy_(copy.from);
      } else {
        rest.push_back(std::move(copy));
      }
    }
    const bool any = rest.size() != pending_.size();
    pending_ = std::move(rest);
    waiting_ = pending_.size();
    return any;
  }
  bool complete_stream(const c10::Stream& stream, uint64_t up_to = UINT64_MAX) {
    return complete(
        [&](const PendingCopy& copy) { return on(copy, stream.device_index(), stream.id()) && copy.ticket <= up_to; });
  }
  bool complete_device(c10::DeviceIndex device) {
    return complete([&](const PendingCopy& copy) { return copy.device == device; });
  }
  void also_on(c10::DeviceIndex device, c10::StreamId recorded, uint64_t up_to, c10::StreamId waiter) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& copy : pending_) {
      if (on(copy, device, recorded) && copy.ticket <= up_to) copy.streams.push_back(waiter);
    }
  }

 private:
  static bool on(const PendingCopy& copy, c10::DeviceIndex device, c10::StreamId stream) {
    return copy.device == device && std::find(copy.streams.begin(), copy.streams.end(), stream) != copy.streams.end();
  }
  std::mutex mutex_;
  std::vector<PendingCopy> pending_;
  std::atomic<size_t> waiting_{0};
  uint64_t ticket_ = 0;
};

struct Event {
  c10::DeviceIndex device;
  c10::StreamId stream;
  uint64_t ticket; // copies enqueued up to here are covered by the event
  std::chrono::steady_clock::time_point when;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::StreamId& current_stream(c10::DeviceIndex device) {
    static thread_local std::array<c10::StreamId, kDevices> ids{};
    return ids[device];
  }
  static c10::Stream stream_of(c10::DeviceIndex device, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, device), id);
  }
  static c10::Stream new_stream(c10::Device d) {
    static std::atomic<c10::StreamId> next{1}; // 0 is every device's default stream
    return stream_of(real(d).index(), next++);
  }
  static c10::Device real(c10::Device d) {
    const c10::DeviceIndex index = d.index() < 0 ? current_device() : d.index();
    check_index(index);
    return {kType, index};
  }

  c10::DeviceType type() const override { return kType; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::Device getDevice() const override { return {kType, current_device()}; }
  void setDevice(c10::Device d) const override {
    if (d.index() >= 0) current_device() = real(d).index();
  }
  void uncheckedSetDevice(c10::Device d) const noexcept override {
    if (d.index() >= 0) current_device() = d.index();
  }
  c10::Device exchangeDevice(c10::Device d) const override {
    const c10::Device before = getDevice();
    setDevice(d);
    return before;
  }

  c10::Stream getStream(c10::Device d) const override {
    return stream_of(real(d).index(), current_stream(real(d).index()));
  }
  c10::Stream getDefaultStream(c10::Device d) const override { return stream_of(real(d).index(), 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return new_stream(d); }
  c10::Stream getNewStream(c10::Device d, int) const override { return new_stream(d); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    const c10::Stream before = getStream(s.device());
    current_stream(s.device_index()) = s.id();
    return before;
  }
  bool queryStream(const c10::Stream& s) const override {
    // "Not yet" once, and done from then on: a polling loop ends, and a caller that does not poll sees the truth.
    return !CopyQueue::get().complete_stream(s);
  }
  void synchronizeStream(const c10::Stream& s) const override { CopyQueue::get().complete_stream(s); }
  void synchronizeDevice(const c10::DeviceIndex i) const override { CopyQueue::get().complete_device(i); }

  void record(void** event, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event();
    *static_cast<Event*>(*event) = {
        s.device_index(), s.id(), CopyQueue::get().ticket(), std::chrono::steady_clock::now()};
  }
  void block(void* event, const c10::Stream& s) const override {
    if (event == nullptr) return;
    auto* e = static_cast<Event*>(event);
    CopyQueue::get().also_on(e->device, e->stream, e->ticket, s.id());
  }
  bool queryEvent(void* event) const override { return event == nullptr || !finish(event); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) finish(event);
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    TORCH_CHECK(from != nullptr && to != nullptr, "the time between two events exists once both are recorded");
    return std::chrono::duration<double, std::milli>(static_cast<Event*>(to)->when - static_cast<Event*>(from)->when)
        .count();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }

 private:
  static bool finish(void* event) {
    auto* e = static_cast<Event*>(event);
    return CopyQueue::get().complete_stream(stream_of(e->device, e->stream), e->ticket);
  }
};

inline c10::Stream stream_now(c10::Device d) {
  const auto index = Guard::real(d).index();
  return Guard::stream_of(index, Guard::current_stream(index));
}

} // namespace sim
