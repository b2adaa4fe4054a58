// Autocast on the simulated accelerator: which operators run in the lower precision, and which in float32.
#pragma once

#include "host_views.h"

#include <ATen/autocast_mode.h>

namespace sim {

// Operator (with overload) names; as CUDA's rule has it, whatever is in neither list follows its arguments.
constexpr const char* kLower[] = {"matmul", "linear", "mm", "bmm", "addmm", "addbmm", "baddbmm", "mv", "addmv", "addr",
    "einsum", "linalg_vecdot", "linalg_multi_dot", "chain_matmul", "conv1d", "conv2d", "conv3d", "conv_transpose1d",
    "conv_transpose2d.input", "conv_transpose3d.input", "convolution", "_convolution", "prelu",
    "scaled_dot_product_attention"};
constexpr const char* kFloat32[] = {"exp", "expm1", "log", "log10", "log2", "log1p", "pow.Tensor_Scalar",
    "pow.Tensor_Tensor", "pow.Scalar", "reciprocal", "rsqrt", "softplus", "layer_norm", "native_layer_norm", "rms_norm",
    "group_norm", "cosine_similarity", "nll_loss", "nll_loss2d", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss",
    "mse_loss", "binary_cross_entropy_with_logits", "softmax.int", "log_softmax.int", "cumsum", "cumprod", "prod",
    "prod.dim_int", "sum", "sum.dim_IntList", "norm.Scalar"};

template <bool kLowerPrecision>
void cast_then_call(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastPrivateUse1);
  const at::ScalarType to = kLowerPrecision ? at::autocast::get_autocast_dtype(kType) : at::kFloat;
  const auto cast = [&](const at::Tensor& t) { return t.defined() ? at::autocast::cached_cast(to, t, kType) : t; };
  const size_t count = op.schema().arguments().size();
  for (size_t i = stack->size() - count; i < stack->size(); ++i) {
    c10::IValue& value = (*stack)[i];
    if (value.isTensor()) {
      value = cast(value.toTensor());
    } else if (value.isTensorList()) {
      auto list = value.toTensorVector();
      for (auto& t : list) t = cast(t);
      value = c10::IValue(std::move(list));
    }
  }
  op.callBoxed(stack);
}

inline void register_autocast(torch::Library& m) {
  for (const char* name : kLower) m.impl(name, torch::CppFunction::makeFromBoxedFunction<&cast_then_call<true>>());
  for (const char* name : kFloat32) m.impl(name, torch::CppFunction::makeFromBoxedFunction<&cast_then_call<false>>());
}

} // namespace sim
