// Operators that cannot be the CPU's kernel on host views: making tensors, copying across devices, exchanging storages.
#pragma once

#include "host_views.h"

#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

namespace sim {

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

inline at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool> pin_memory, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin_memory.value_or(false), "pin_memory is for CPU tensors, not for the simulated accelerator's");
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &device_allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

inline at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool> pin_memory) {
  TORCH_CHECK(!pin_memory.value_or(false), "pin_memory is for CPU tensors, not for the simulated accelerator's");
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &device_allocator(), kKeys, c10::dtype_or_default(dtype));
}

// A zero with a shape and no memory: autograd makes them for gradients that are known to vanish.
inline at::Tensor efficient_zero(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  const c10::Device where = Guard::real(device.value_or(c10::Device(kType)));
  const auto type = c10::scalarTypeToTypeMeta(c10::dtype_or_default(dtype));
  const size_t bytes = at::detail::computeStorageNbytesContiguous(size, type.itemsize());
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes, c10::DataPtr(nullptr, where), &device_allocator(), true));
  auto zero = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), kKeys.add(c10::DispatchKey::ZeroTensor), type);
  zero.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return zero;
}

inline at::Tensor& copy_(at::Tensor& self, const at::Tensor& src, bool non_blocking) {
  if (self.is_same(src)) return self;
  TORCH_CHECK(!self._is_zerotensor(),
      "this tensor is a zero without memory (simulated accelerator) and cannot be written to: clone it first");
  if (src._is_zerotensor()) return self.zero_(); // such a gradient has a shape and no memory
  at::AutoDispatchBelowADInplaceOrView below;
  const c10::Stream stream = stream_now(on_device(src) ? src.device() : self.device());
  auto& queue = CopyQueue::get();
  if (deferring_copies && non_blocking && self.is_cpu() && on_device(src) &&
      PinnedRanges::get().holds(self.storage().data())) {
    // The bytes as they are now: work enqueued later must not change what this copy delivers.
    queue.add(self, at::empty(self.sizes(), host_view(src).options()).copy_(host_view(src)), stream);
    return self;
  }
  if (!on_device(self) || !on_device(src)) queue.complete_stream(stream); // the same stream delivers in order
  at::Tensor host = host_view(self);
  host.copy_(host_view(src));
  return self;
}

inline at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  at::Tensor target = dst;
  return copy_(target, self, non_blocking);
}

inline at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  at::Tensor target = dst;
  target.resize_(self.sizes());
  return copy_(target, self, false);
}

inline at::Scalar local_scalar_dense(const at::Tensor& self) {
  CopyQueue::get().complete_stream(stream_now(self.device())); // reading a number waits for the stream
  at::AutoDispatchBelowADInplaceOrView below;
  return at::_local_scalar_dense(host_view(self));
}

inline void grow(const at::Tensor& self) {
  if (self.numel() == 0) return;
  const size_t needed = at::detail::computeStorageNbytes(
      self.sizes(), self.strides(), self.dtype().itemsize(), self.storage_offset());
  auto* storage = self.storage().unsafeGetStorageImpl();
  if (needed > storage->nbytes()) resize_storage(storage, needed);
}

inline const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  if (self.sizes() != size) {
    self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
    grow(self);
  }
  if (format) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

inline at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  at::native::checkSetStorage<int64_t>(self, std::move(source), offset, size, stride, /*check_offset_in_bounds=*/false);
  auto* impl = self.unsafeGetTensorImpl();
  if (stride.data() == nullptr) {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride, offset);
  }
  grow(self);
  return self;
}

inline at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const auto items = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_storage(self, std::move(source), 0, {items}, {});
}

inline at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return self.is_same(source)
             ? self
             : set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

inline at::Tensor& set_empty(at::Tensor& self) {
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), 0, device_bytes(0, self.device().index()), &device_allocator(), true));
  return set_storage(self, std::move(storage), 0, {0}, {});
}

// PyTorch answers by backend lists that no out-of-tree device is in; without this `model.to(device)` and FSDP1 cannot
// exchange a parameter's data in place.
inline bool compatible_shallow_copy(const at::Tensor& self, const at::Tensor& from) {
  return self.layout() == at::kStrided && from.layout() == at::kStrided;
}

inline int64_t choose_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const std::optional<at::Tensor>& mask, double dropout, bool causal, std::optional<double> scale, bool gqa) {
  constexpr int64_t kMath = 0, kFlash = 1, kOverrideable = 4;
  const std::optional<at::Tensor> host_mask = mask ? std::optional<at::Tensor>(host_view(*mask)) : std::nullopt;
  const int64_t cpu = at::_fused_sdp_choice(
      host_view(q), host_view(k), host_view(v), host_mask, dropout, causal, scale, gqa);
  return cpu == kFlash && !(mask && mask->requires_grad()) ? kOverrideable : kMath;
}

// The CPU's flash attention under the operator that PyTorch keeps for other devices.
inline std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor, at::Tensor,
    at::Tensor>
attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& bias,
    double dropout, bool causal, bool, std::optional<double> scale) {
  at::AutoDispatchBelowADInplaceOrView below;
  const int device = q.device().index();
  const std::optional<at::Tensor> mask = bias && bias->defined() ? std::optional<at::Tensor>(host_view(*bias))
                                                                 : std::nullopt;
  auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(
      host_view(q), host_view(k), host_view(v), dropout, causal, mask, scale);
  const auto none = [&] { return at::detail::empty_generic({0}, &device_allocator(), kKeys, at::kLong, std::nullopt); };
  return {adopt(out, device), adopt(lse, device), none(), none(), q.size(2), k.size(2), none(), none(), none()};
}

inline std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> attention_backward(const at::Tensor& grad,
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& bias, std::array<bool, 4>,
    const at::Tensor& out, const at::Tensor& lse, const at::Tensor&, const at::Tensor&, int64_t, int64_t,
    double dropout, bool causal, const at::Tensor&, const at::Tensor&, std::optional<double> scale) {
  at::AutoDispatchBelowADInplaceOrView below;
  const int device = q.device().index();
  const std::optional<at::Tensor> mask = bias.defined() && bias.numel() ? std::optional<at::Tensor>(host_view(bias))
                                                                        : std::nullopt;
  auto [gq, gk, gv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(host_view(grad), host_view(q),
      host_view(k), host_view(v), host_view(out), host_view(lse), dropout, causal, mask, scale);
  return {adopt(gq, device), adopt(gk, device), adopt(gv, device), at::Tensor()};
}

inline at::Tensor convolution(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& b,
    at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
    at::IntArrayRef output_padding, int64_t groups) {
  at::AutoDispatchBelowADInplaceOrView below;
  const std::optional<at::Tensor> bias = b && b->defined() ? std::optional<at::Tensor>(host_view(*b)) : std::nullopt;
  return adopt(
      at::convolution(host_view(x), host_view(w), bias, stride, padding, dilation, transposed, output_padding, groups)
          .contiguous(),
      x.device().index());
}

inline std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(const at::Tensor& grad, const at::Tensor& x,
    const at::Tensor& w, at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
    at::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> wanted) {
  at::AutoDispatchBelowADInplaceOrView below;
  const int device = x.device().index();
  const int64_t channels = grad.size(1);
  auto [gx, gw, gb] = at::convolution_backward(host_view(grad), host_view(x), host_view(w), at::IntArrayRef(channels),
      stride, padding, dilation, transposed, output_padding, groups, wanted);
  const auto take = [&](const at::Tensor& t) { return t.defined() ? adopt(t.contiguous(), device) : t; };
  return {take(gx), take(gw), take(gb)};
}

// Freed memory is not handed out again while a copy is under way here, so there is nothing to remember; FSDP1 asks for
// it.
inline void record_stream(at::Tensor&, at::Stream) {}

inline void register_kernels(torch::Library& m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_efficientzerotensor", &efficient_zero);
  m.impl("copy_", &copy_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("resize_", &resize_);
  m.impl("record_stream", &record_stream);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_empty);
  m.impl("_has_compatible_shallow_copy_type", &compatible_shallow_copy);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("_scaled_dot_product_fused_attention_overrideable", &attention);
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", &attention_backward);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
}

} // namespace sim

// DispatchStub's registration looks for the stub by its unqualified name.
namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &sim::choose_attention)
} // namespace at::native
