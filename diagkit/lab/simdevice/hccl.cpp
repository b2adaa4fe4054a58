// `hccl`: the simulated accelerator's collective backend. It gives gloo host views of device memory, so that nothing is
// copied, and behaves towards its caller as an accelerator's library does: it averages (gloo does not), and it refuses
// tensors that are not on the device.
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include <pybind11/chrono.h>

namespace {

using c10d::Backend;
using c10d::ReduceOp;
using c10d::Work;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<Work>;
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13
using PremulFactor = c10d::NCCLPreMulSumSupplement;
#else
using PremulFactor = c10d::PreMulSumSupplement;
#endif

void release_storage(void* context) {
  c10::raw::intrusive_ptr::decref(static_cast<c10::StorageImpl*>(context));
}

at::Tensor host(const at::Tensor& t) {
  TORCH_CHECK(t.device().type() == c10::DeviceType::PrivateUse1,
      "hccl (simulated) takes tensors of the accelerator only, got one on ", t.device(),
      ": move it to the device, or give the process group a backend for its device, such as cpu:gloo,npu:hccl");
  TORCH_CHECK(t.layout() == at::kStrided, "hccl (simulated) takes dense tensors only");
  // The view holds the device storage: gloo may still be reading when the caller drops its tensor.
  auto* impl = t.storage().unsafeGetStorageImpl();
  c10::raw::intrusive_ptr::incref(impl);
  c10::DataPtr data(impl->mutable_data(), impl, &release_storage, c10::Device(c10::kCPU));
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), impl->nbytes(), std::move(data), nullptr, /*resizable=*/false));
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  return view;
}

Tensors host(const Tensors& list) {
  Tensors views;
  views.reserve(list.size());
  for (const auto& t : list) views.push_back(host(t));
  return views;
}

std::vector<Tensors> host(const std::vector<Tensors>& lists) {
  std::vector<Tensors> views;
  views.reserve(lists.size());
  for (const auto& list : lists) views.push_back(host(list));
  return views;
}

// Several works under one handle: what a coalesced group returns; without parts, a work that is already done.
class Together final : public Work {
 public:
  explicit Together(std::vector<WorkPtr> parts, Tensors results = {})
      : parts_(std::move(parts)), results_(std::move(results)) {}
  bool isCompleted() override {
    for (auto& part : parts_) {
      if (!part->isCompleted()) return false;
    }
    return true;
  }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds timeout) override {
    for (auto& part : parts_) part->wait(timeout);
    parts_.clear();
    return true;
  }
  void synchronize() override { wait(std::chrono::milliseconds::zero()); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    wait(std::chrono::milliseconds::zero());
    auto done = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    done->markCompleted(c10::IValue(results_));
    return done;
  }

 private:
  std::vector<WorkPtr> parts_;
  Tensors results_;
};

class Hccl final : public Backend {
 public:
  explicit Hccl(c10::intrusive_ptr<Backend> gloo) : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override { return "hccl"; }
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR > 8
  c10::intrusive_ptr<Options> getBackendOptions() override { return gloo_->getBackendOptions(); }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
#endif
  void setSequenceNumberForGroup() override { gloo_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo_->getSequenceNumberForGroup(); }
  void abort() override { gloo_->abort(); }
  void shutdown() override { gloo_->shutdown(); }

  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override {
    coalescing_ = true;
    gathered_.clear();
  }
  WorkPtr endCoalescing() override {
    coalescing_ = false;
    return c10::make_intrusive<Together>(std::move(gathered_));
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    auto views = host(tensors);
    return kept(gloo_->broadcast(views, opts));
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    auto views = host(tensors);
    c10d::AllreduceOptions plain = opts;
    const auto scale = before(views, plain.reduceOp);
    return after(gloo_->allreduce(views, plain), views, scale, tensors);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    std::vector<WorkPtr> works;
    for (auto& t : tensors) {
      Tensors one{t};
      works.push_back(allreduce(one, opts));
    }
    return c10::make_intrusive<Together>(std::move(works));
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    auto views = host(tensors);
    c10d::ReduceOptions plain = opts;
    const auto scale = before(views, plain.reduceOp);
    return after(gloo_->reduce(views, plain), getRank() == opts.rootRank ? views : Tensors{}, scale, tensors);
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    auto out = host(outputs);
    auto in = host(inputs);
    return kept(gloo_->allgather(out, in, opts));
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override {
    auto out = host(output);
    auto in = host(input);
    return kept(gloo_->_allgather_base(out, in, opts));
  }
  WorkPtr allgather_coalesced(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    auto out = host(outputs);
    auto in = host(inputs);
    return kept(gloo_->allgather_coalesced(out, in, opts));
  }
  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    auto out = host(outputs);
    auto in = host(inputs);
    return kept(gloo_->allgather_into_tensor_coalesced(out, in, opts));
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override {
    auto out = host(outputs);
    auto in = host(inputs);
    return kept(gloo_->gather(out, in, opts));
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) override {
    auto out = host(outputs);
    auto in = host(inputs);
    return kept(gloo_->scatter(out, in, opts));
  }
  WorkPtr reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& opts) override {
    auto out = host(outputs);
    auto in = host(inputs);
    c10d::ReduceScatterOptions plain = opts;
    std::optional<double> scale;
    for (auto& list : in) scale = before(list, plain.reduceOp, /*own=*/true);
    return after(gloo_->reduce_scatter(out, in, plain), out, scale, outputs);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    auto out = host(output);
    Tensors in{host(input)};
    c10d::ReduceScatterOptions plain = opts;
    const auto scale = before(in, plain.reduceOp, /*own=*/true);
    return after(gloo_->_reduce_scatter_base(out, in[0], plain), {out}, scale, {output});
  }
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) override {
    auto out = host(outputs);
    auto in = host(inputs);
    c10d::ReduceScatterOptions plain = opts;
    const auto scale = before(in, plain.reduceOp, /*own=*/true);
    return after(gloo_->reduce_scatter_tensor_coalesced(out, in, plain), out, scale, outputs);
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
      std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& opts) override {
    auto out = host(output);
    auto in = host(input);
    return kept(gloo_->alltoall_base(out, in, output_splits, input_splits, opts));
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override {
    // gloo exchanges one flat tensor, so lists are packed and unpacked around it.
    auto out = host(outputs);
    auto in = host(inputs);
    std::vector<int64_t> in_splits, out_splits;
    Tensors flat;
    for (const auto& t : in) {
      flat.push_back(t.reshape({-1}));
      in_splits.push_back(t.numel());
    }
    int64_t total = 0;
    for (const auto& t : out) {
      out_splits.push_back(t.numel());
      total += t.numel();
    }
    at::Tensor packed = at::cat(flat);
    at::Tensor received = at::empty({total}, packed.options());
    auto work = gloo_->alltoall_base(received, packed, out_splits, in_splits, opts);
    work->wait(opts.timeout.count() < 0 ? kNoTimeout : opts.timeout);
    int64_t at = 0;
    for (auto& t : out) {
      t.copy_(received.narrow(0, at, t.numel()).view(t.sizes()));
      at += t.numel();
    }
    return kept(work);
  }
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    auto views = host(tensors);
    return kept(gloo_->send(views, to, tag));
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    auto views = host(tensors);
    return kept(gloo_->recv(views, from, tag));
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    auto views = host(tensors);
    return kept(gloo_->recvAnysource(views, tag));
  }
  WorkPtr barrier(const c10d::BarrierOptions& opts) override { return kept(gloo_->barrier(opts)); }

 private:
  WorkPtr kept(WorkPtr work) {
    if (coalescing_) gathered_.push_back(work);
    return work;
  }
  // Turns what gloo cannot reduce with into a sum; the answer is the factor for the sum. `own`: the inputs are the
  // caller's and must stay as they are, so a factor that applies before the sum needs a copy.
  std::optional<double> before(Tensors& tensors, ReduceOp& op, bool own = false) {
    if (op == ReduceOp::AVG) {
      op = ReduceOp(ReduceOp::SUM);
      return static_cast<double>(getSize());
    }
    if (op == ReduceOp::PREMUL_SUM) {
      const auto* extra = dynamic_cast<const PremulFactor*>(op.supplement_.get());
      TORCH_CHECK(extra != nullptr, "hccl (simulated): PREMUL_SUM without a factor");
      for (auto& t : tensors) {
        if (own) t = t.clone();
        extra->tensor_factor.defined() ? t.mul_(extra->tensor_factor.cpu()) : t.mul_(extra->double_factor);
      }
      op = ReduceOp(ReduceOp::SUM);
    }
    return std::nullopt;
  }
  WorkPtr after(WorkPtr work, const Tensors& results, std::optional<double> divisor, Tensors originals) {
    if (divisor) {
      work->wait(kNoTimeout);
      for (auto t : results) at::isIntegralType(t.scalar_type(), true) ? t.floor_divide_(*divisor) : t.div_(*divisor);
      // Not gloo's own work: some of those write the sum into the output again at every wait.
      work = c10::make_intrusive<Together>(std::vector<WorkPtr>{}, std::move(originals));
    }
    return kept(work);
  }

  c10::intrusive_ptr<Backend> gloo_;
  bool coalescing_ = false;
  std::vector<WorkPtr> gathered_;
};

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  pybind11::module_::import("torch.distributed"); // defines the Python type of c10d::Backend that ours derives from
  pybind11::class_<Hccl, Backend, c10::intrusive_ptr<Hccl>>(m, "Hccl").def(
      pybind11::init<c10::intrusive_ptr<Backend>>(), pybind11::arg("gloo"));
}
