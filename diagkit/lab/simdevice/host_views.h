// How an operator runs on the simulated accelerator: the CPU's own kernel on host views of the device's memory.
//
// Going in, every device tensor is replaced by a host tensor over the same bytes. Coming out, a result that is an
// argument becomes that argument again, a result that aliases an argument becomes a view of it, and a new result is
// adopted: the device takes the bytes over. Nothing is copied, so values equal the CPU's bit for bit wherever the
// kernel is the same.
#pragma once

#include "hooks.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/CPUFallback.h>
#include <c10/core/TensorImpl.h>

namespace sim {

inline bool on_device(const at::Tensor& t) {
  return t.defined() && t.device().type() == kType;
}

inline void release_storage(void* context) {
  c10::raw::intrusive_ptr::decref(static_cast<c10::StorageImpl*>(context));
}

// The host's name for a device storage. It holds the device storage, so a host view may outlive its tensor.
inline c10::Storage host_storage(const c10::Storage& device) {
  auto* impl = device.unsafeGetStorageImpl();
  c10::raw::intrusive_ptr::incref(impl);
  c10::DataPtr data(impl->mutable_data(), impl, &release_storage, c10::Device(c10::kCPU));
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), impl->nbytes(),
      std::move(data), c10::GetCPUAllocator(), /*resizable=*/true));
}

inline at::Tensor tensor_like(const at::Tensor& like, c10::Storage storage, c10::DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) impl->_set_conj(true);
  if (like.is_neg()) impl->_set_neg(true);
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return made;
}

inline at::Tensor host_view(const at::Tensor& t) {
  return on_device(t) ? tensor_like(t, host_storage(t.storage()), c10::DispatchKey::CPU) : t;
}

inline at::Tensor adopt(const at::Tensor& host, int device) {
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(),
      host.storage().nbytes(), adopt_bytes(host.storage(), device), &device_allocator(), true));
  return tensor_like(host, std::move(storage), c10::DispatchKey::PrivateUse1);
}

// One operator call: its arguments on the host, and the way back.
class HostCall {
 public:
  at::Tensor in(const at::Tensor& t, bool written, bool listed = false) {
    if (!t.defined()) return t;
    if (!on_device(t)) {
      // A CPU scalar may travel with device tensors, as on any accelerator; nothing larger may.
      if (t.dim() > 0) other_ = t.device();
      return t;
    }
    see(t.device());
    if (!listed) {
      for (auto& m : moved_) {
        if (m.device.unsafeGetTensorImpl() == t.unsafeGetTensorImpl()) {
          m.written |= written;
          return m.host;
        }
      }
    }
    // One host storage for one device storage, because kernels look for overlapping arguments by storage.
    c10::Storage storage;
    if (!listed) {
      for (auto& m : moved_) {
        if (m.device.storage().is_alias_of(t.storage())) storage = m.host.storage();
      }
    }
    if (!storage) storage = host_storage(t.storage());
    const void* data = storage.data();
    at::Tensor host = tensor_like(t, std::move(storage), c10::DispatchKey::CPU);
    moved_.push_back({t, host, data, written});
    return host;
  }
  void see(c10::Device d) {
    if (!device_) {
      device_ = d;
    } else if (*device_ != d) {
      other_ = d;
    }
  }
  bool mixed() const { return device_ && other_; }
  int device() const { return device_ && device_->index() >= 0 ? device_->index() : current_device(); }
  void require_one_device(const c10::OperatorHandle& op) const {
    TORCH_CHECK(!mixed(), "Expected all tensors to be on the same device, but found at least two devices, ", *device_,
        " and ", *other_, "! (when running ", op.operator_name().name, " on the simulated accelerator)");
  }
  // Arguments that the kernel resized or moved to new memory: the device tensor follows.
  void settle() {
    for (auto& m : moved_) {
      if (!m.written) continue;
      auto* device = m.device.unsafeGetTensorImpl();
      const auto& host = m.host.storage();
      if (host.data() != m.data) {
        auto* storage = m.device.storage().unsafeGetStorageImpl();
        storage->set_data_ptr_noswap(adopt_bytes(host, storage->device().index()));
        storage->set_nbytes(host.nbytes());
      }
      if (m.host.sizes() != m.device.sizes() || m.host.strides() != m.device.strides() ||
          m.host.storage_offset() != m.device.storage_offset()) {
        device->set_sizes_and_strides(m.host.sizes(), m.host.strides(), m.host.storage_offset());
      }
    }
  }
  at::Tensor out(const at::Tensor& t) {
    if (!t.defined() || !t.device().is_cpu()) return t;
    TORCH_CHECK(t.layout() == at::kStrided, "the simulated accelerator has dense tensors only, not ", t.layout());
    for (auto& m : moved_) {
      if (m.host.unsafeGetTensorImpl() == t.unsafeGetTensorImpl()) return m.device;
    }
    for (auto& m : moved_) {
      if (m.host.storage().is_alias_of(t.storage()))
        return tensor_like(t, m.device.storage(), c10::DispatchKey::PrivateUse1);
    }
    for (auto& [host, device] : adopted_) { // two results over one storage stay two views of one storage
      if (host.is_alias_of(t.storage())) return tensor_like(t, device, c10::DispatchKey::PrivateUse1);
    }
    at::Tensor made = adopt(t, device());
    adopted_.emplace_back(t.storage(), made.storage());
    return made;
  }

 private:
  struct Moved {
    at::Tensor device;
    at::Tensor host;
    const void* data;
    bool written;
  };
  c10::SmallVector<Moved, 6> moved_;
  c10::SmallVector<std::pair<c10::Storage, c10::Storage>, 2> adopted_;
  std::optional<c10::Device> device_;
  std::optional<c10::Device> other_;
};

// Random operators draw from the device's generator: handed over where the schema has a generator argument, else by
// lending the CPU's default generator that state for the time of the call.
class LentGenerator {
 public:
  explicit LentGenerator(const at::Generator& device)
      : next_(at::check_generator<Generator>(device)->next_host_generator()) {}
  const at::Generator& generator() const { return next_; }
  void lend() {
    auto* cpu = at::get_generator_or_default<at::CPUGeneratorImpl>(std::nullopt, at::detail::getDefaultCPUGenerator());
    std::lock_guard<std::mutex> lock(cpu->mutex_);
    kept_ = cpu->get_state();
    cpu->set_state(*next_.get_state().unsafeGetTensorImpl());
  }
  ~LentGenerator() {
    if (!kept_) return;
    auto* cpu = at::get_generator_or_default<at::CPUGeneratorImpl>(std::nullopt, at::detail::getDefaultCPUGenerator());
    std::lock_guard<std::mutex> lock(cpu->mutex_);
    cpu->set_state(*kept_);
  }

 private:
  at::Generator next_;
  c10::intrusive_ptr<c10::TensorImpl> kept_;
};

inline void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  const size_t first = stack->size() - arguments.size();
  const bool random = op.hasTag(at::Tag::nondeterministic_seeded);
  const bool per_index = schema.name().compare(0, 14, "aten::_foreach") == 0;
  HostCall call;
  std::optional<at::Generator> chosen;
  int64_t generator_slot = -1;
  const torch::jit::Stack original = per_index ? torch::jit::Stack(stack->begin() + first, stack->end())
                                               : torch::jit::Stack();

  for (size_t i = 0; i < arguments.size(); ++i) {
    c10::IValue& value = (*stack)[first + i];
    const bool written = arguments[i].alias_info() != nullptr && arguments[i].alias_info()->isWrite();
    if (value.isTensor()) {
      value = call.in(value.toTensor(), written);
    } else if (value.isTensorList()) {
      auto list = value.toTensorVector();
      for (auto& t : list) t = call.in(t, written, /*listed=*/true);
      value = c10::IValue(std::move(list));
    } else if (value.isOptionalTensorList()) {
      // Indices: they may stay on the CPU while what they index is on the device.
      c10::List<std::optional<at::Tensor>> list;
      for (std::optional<at::Tensor> t : value.toOptionalTensorList()) {
        list.push_back(t && on_device(*t) ? std::optional<at::Tensor>(call.in(*t, written)) : t);
      }
      value = c10::IValue(std::move(list));
    } else if (value.isDevice()) {
      if (value.toDevice().type() == kType) {
        call.see(Guard::real(value.toDevice()));
        value = c10::Device(c10::kCPU);
      }
    } else if (random && arguments[i].name() == "generator") {
      generator_slot = static_cast<int64_t>(first + i);
      if (value.isGenerator()) chosen = value.toGenerator();
    }
  }
  if (per_index && call.mixed()) {
    // Lists over several devices: PyTorch's own loop takes them one index at a time, and each index is checked then.
    std::copy(original.begin(), original.end(), stack->begin() + first);
    op.redispatchBoxed(
        c10::DispatchKeySet(c10::DispatchKey::VE), stack); // a backend without kernels: the composite one
    return;
  }
  call.require_one_device(op);

  std::optional<LentGenerator> lent;
  if (random && (!chosen || chosen->device().type() == kType)) {
    lent.emplace(chosen ? *chosen : default_generator(static_cast<c10::DeviceIndex>(call.device())));
    if (generator_slot >= 0) {
      (*stack)[generator_slot] = lent->generator();
    } else {
      lent->lend();
    }
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  call.settle();

  const size_t results = schema.returns().size();
  for (size_t i = stack->size() - results; i < stack->size(); ++i) {
    c10::IValue& value = (*stack)[i];
    if (value.isTensor()) {
      value = call.out(value.toTensor());
    } else if (value.isTensorList()) {
      auto list = value.toTensorVector();
      for (auto& t : list) t = call.out(t);
      value = c10::IValue(std::move(list));
    }
  }
}

} // namespace sim
