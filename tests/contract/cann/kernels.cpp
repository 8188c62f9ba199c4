// The fused operators that a trainer and an engine call, as CANN documents them, computed by torch on the device's memory.
//
// Arguments are taken by the names that torch_npu's and vllm-ascend's own schemas give them; a case that nobody here asks
// for ends in an error, never in another result.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <vector>

namespace c10_npu {
void npuSynchronizeDevice(bool check_error);
}

namespace {
using at::Tensor;

// The same memory as a tensor of the host.
Tensor host(const Tensor &on_device) {
  return at::from_blob(on_device.data_ptr(), on_device.sizes(), on_device.strides(), on_device.scalar_type());
}

struct Call {
  const c10::FunctionSchema &schema;
  torch::jit::Stack *stack;
  size_t count;

  Call(const c10::OperatorHandle &op, torch::jit::Stack *stack)
      : schema(op.schema()), stack(stack), count(op.schema().arguments().size()) {
    c10_npu::npuSynchronizeDevice(false);
  }

  const c10::IValue &operator[](const char *name) const {
    for (size_t i = 0; i < count; i++)
      if (schema.arguments()[i].name() == name) return (*stack)[stack->size() - count + i];
    TORCH_CHECK(false, "stand-in for CANN: ", schema.name(), " has no argument ", name);
  }
  bool given(const char *name) const {
    auto &value = (*this)[name];
    return !value.isNone() && !(value.isTensor() && !value.toTensor().defined());
  }
  Tensor device(const char *name) const { return (*this)[name].toTensor(); }
  Tensor tensor(const char *name) const { return host(device(name)); }
  double number(const char *name) const { return (*this)[name].toDouble(); }
  int64_t integer(const char *name) const { return (*this)[name].toInt(); }
  std::string text(const char *name) const { return (*this)[name].toStringRef(); }
  std::vector<int64_t> integers(const char *name) const { return (*this)[name].toIntVector(); }
  void wants(bool right, const char *what) const {
    TORCH_CHECK(right, "stand-in for CANN: ", schema.name(), " computes ", what, " alone");
  }

  template <class... Results>
  void returns(Results... results) const {
    stack->erase(stack->end() - count, stack->end());
    (stack->push_back(results), ...);
  }
};

Tensor to_device(const Tensor &on_host, const Tensor &like) {
  auto out = at::empty(on_host.sizes(), like.options().dtype(on_host.scalar_type()));
  host(out).copy_(on_host);
  return out;
}

using Kernel = void(const Call &);

template <Kernel *kernel>
void boxed(const c10::OperatorHandle &op, torch::jit::Stack *stack) {
  c10::InferenceMode none(false);
  at::NoGradGuard no_gradients;
  kernel(Call(op, stack));
}

// --- norms and activations

std::pair<Tensor, Tensor> rms_norm(const Tensor &x, const Tensor &gamma, double epsilon) {
  auto wide = x.to(at::kFloat);
  auto rstd = wide.pow(2).mean(-1, true).add(epsilon).rsqrt();
  return {((wide * rstd) * gamma.to(at::kFloat)).to(x.scalar_type()), rstd};
}

void npu_rms_norm(const Call &call) {
  auto x = call.device("input");
  auto [y, rstd] = rms_norm(host(x), call.tensor("gamma"), call.number("epsilon"));
  call.returns(to_device(y, x), to_device(rstd, x));
}

// MindSpeed's norm is trained by it: in the jobs that are run with MindSpeed, by hand.
void npu_rms_norm_backward(const Call &call) {
  auto x = call.device("input");
  auto gamma = call.tensor("gamma"), rstd = call.tensor("rstd");
  auto normed = host(x).to(at::kFloat) * rstd, dy = call.tensor("dy").to(at::kFloat);
  auto scaled = dy * gamma.to(at::kFloat);
  auto dx = (scaled - normed * (scaled * normed).mean(-1, true)) * rstd;
  auto dgamma = (dy * normed).reshape({-1, gamma.size(0)}).sum(0);
  call.returns(to_device(dx.to(x.scalar_type()), x), to_device(dgamma, x));
}

void add_rms_norm_bias(const Call &call) {
  call.wants(!call.given("beta"), "without beta");
  auto x1 = call.device("x1");
  auto sum = host(x1) + call.tensor("x2");
  auto [y, rstd] = rms_norm(sum, call.tensor("gamma"), call.number("epsilon"));
  call.returns(to_device(y, x1), to_device(rstd, x1), to_device(sum, x1));
}

void npu_swiglu(const Call &call) {
  auto x = call.device("input");
  auto parts = host(x).chunk(2, call.integer("dim"));
  call.returns(to_device(at::silu(parts[0]) * parts[1], x));
}

void npu_swiglu_backward(const Call &call) {
  auto x = call.device("input");
  auto dy = call.tensor("grad_output");
  auto parts = host(x).chunk(2, call.integer("dim"));
  auto gate = at::silu_backward(dy * parts[1], parts[0]);
  call.returns(to_device(at::cat({gate, dy * at::silu(parts[0])}, call.integer("dim")), x));
}

void matmul_add_fp32(const Call &call) {
  call.tensor("C").add_(at::matmul(call.tensor("x").t().to(at::kFloat), call.tensor("weight").to(at::kFloat)));
  call.returns();
}

// --- attention

// That a call is given the mask which both causal modes take, whatever the lengths are.
void wants_upper_triangle(const Call &call) {
  call.wants(call.given("atten_mask"), "with a mask");
  auto mask = call.tensor("atten_mask");
  call.wants(mask.size(0) == 2048 && mask[0][1].item<bool>() && !mask[1][0].item<bool>(), "an upper triangle of 2048");
}

// Of [T, heads, D] over [S, kv heads, D]; causal as CANN's right-down: the last query sees all.
Tensor attend(const Tensor &query, const Tensor &key, const Tensor &value, double scale) {
  auto q = query.transpose(0, 1).to(at::kFloat), k = key.transpose(0, 1).to(at::kFloat);
  auto v = value.transpose(0, 1).to(at::kFloat);
  auto groups = q.size(0) / k.size(0);
  k = k.repeat_interleave(groups, 0), v = v.repeat_interleave(groups, 0);
  auto scores = at::matmul(q, k.transpose(1, 2)) * scale;
  auto hidden = at::ones({q.size(1), k.size(1)}, at::kBool).triu(k.size(1) - q.size(1) + 1);
  scores.masked_fill_(hidden, -std::numeric_limits<float>::infinity());
  return at::matmul(scores.softmax(-1), v).transpose(0, 1).to(query.scalar_type());
}

// Rows of one sequence in a cache of [blocks, rows of a block, ...]
Tensor cached(const Tensor &cache, const Tensor &blocks, int64_t length, int64_t heads) {
  auto rows = cache.size(1), count = (length + rows - 1) / rows;
  auto found = cache.index_select(0, blocks.slice(0, 0, count).to(at::kLong));
  return found.reshape({count * rows, heads, -1}).slice(0, 0, length);
}

void fused_infer_attention_score(const Call &call) {
  auto on_device = call.device("query");
  auto query = host(on_device), key = call.tensor("key"), value = call.tensor("value");
  call.wants(call.text("input_layout") == "TND" && call.integer("sparse_mode") == 3, "TND with sparse_mode 3");
  call.wants(!call.given("pse_shift") && !call.given("query_rope"), "without pse_shift and query_rope");
  wants_upper_triangle(call);
  auto ends = call.integers("actual_seq_lengths"), lengths = call.integers("actual_seq_lengths_kv");
  auto heads = call.integer("num_key_value_heads");
  auto out = at::zeros_like(query);
  int64_t begin = 0, key_begin = 0;
  for (size_t i = 0; i < ends.size(); i++) {
    Tensor k, v;
    if (call.given("block_table")) {
      auto blocks = call.tensor("block_table")[i];
      k = cached(key, blocks, lengths[i], heads), v = cached(value, blocks, lengths[i], heads);
    } else {
      k = key.slice(0, key_begin, lengths[i]), v = value.slice(0, key_begin, lengths[i]);
      key_begin = lengths[i];
    }
    if (ends[i] > begin && k.size(0))
      out.slice(0, begin, ends[i]).copy_(attend(query.slice(0, begin, ends[i]), k, v, call.number("scale")));
    begin = ends[i];
  }
  call.returns(to_device(out, on_device), to_device(at::zeros({1}), on_device));
}

void reshape_and_cache(const Call &call) {
  auto slots = call.tensor("slot_indices").to(at::kLong);
  auto kept = slots.ge(0).nonzero().squeeze(1);
  slots = slots.index_select(0, kept);
  for (auto [from, to] : {std::pair{"key", "key_cache"}, std::pair{"value", "value_cache"}}) {
    auto cache = call.tensor(to);
    cache.flatten(0, 1).index_copy_(0, slots, call.tensor(from).index_select(0, kept));
  }
  call.returns();
}

void rotary_embedding(const Call &call) {
  call.wants(call["is_neox_style"].toBool(), "the layout of NeoX");
  auto size = call.integer("head_size");
  auto found = call.tensor("cos_sin_cache").index_select(0, call.tensor("positions").to(at::kLong));
  auto angles = found.to(at::kFloat).chunk(2, -1);
  auto cos = angles[0].unsqueeze(1), sin = angles[1].unsqueeze(1);
  for (auto name : {"query", "key"}) {
    auto whole = call.tensor(name);
    auto halves = whole.view({whole.size(0), -1, size}).to(at::kFloat).chunk(2, -1);
    auto turned = at::cat({halves[0] * cos - halves[1] * sin, halves[1] * cos + halves[0] * sin}, -1);
    whole.copy_(turned.view(whole.sizes()));
  }
  call.returns();
}

// Of a row [T, heads, D]: each sequence by itself, causal from the left upper corner.
struct Training {
  Tensor q, k, v;
  int64_t groups;
  double scale;
  Tensor probabilities;

  explicit Training(const Call &call, const char *scale_name) : scale(call.number(scale_name)) {
    call.wants(call.text("input_layout") == "TND" && call.integer("sparse_mode") == 2, "TND with sparse_mode 2");
    call.wants(call.number("keep_prob") == 1.0 && !call.given("pse"), "without dropout and pse");
    wants_upper_triangle(call);
    auto query = call.tensor("query");
    call.wants(query.size(1) == call.integer("head_num"), "as many heads as it is told");
    auto ends = call.integers("actual_seq_qlen");
    call.wants(ends == call.integers("actual_seq_kvlen") && ends.back() == query.size(0), "whole rows of sequences");
    q = by_head(query), k = by_head(call.tensor("key")), v = by_head(call.tensor("value"));
    groups = q.size(0) / k.size(0);
    k = k.repeat_interleave(groups, 0), v = v.repeat_interleave(groups, 0);
    auto hidden = at::ones({query.size(0), query.size(0)}, at::kBool);
    int64_t begin = 0;
    for (auto end : ends) {
      auto length = end - begin;
      hidden.slice(0, begin, end).slice(1, begin, end).copy_(at::ones({length, length}, at::kBool).triu(1));
      begin = end;
    }
    auto scores = at::matmul(q, k.transpose(1, 2)) * scale;
    probabilities = scores.masked_fill(hidden, -std::numeric_limits<float>::infinity()).softmax(-1);
  }
  // [T, heads, D] -> [heads, T, D]
  static Tensor by_head(const Tensor &x) { return x.transpose(0, 1).to(at::kFloat); }
  static Tensor back(const Tensor &x, const Tensor &like) { return x.transpose(0, 1).contiguous().to(like.scalar_type()); }
  Tensor shared(const Tensor &gradient) const { return gradient.unflatten(0, {-1, groups}).sum(1); }
};

void fusion_attention(const Call &call) {
  auto query = call.device("query");
  Training t(call, "scale");
  auto out = to_device(Training::back(at::matmul(t.probabilities, t.v), query), query);
  auto statistics = to_device(at::zeros({t.q.size(1), t.q.size(0), 8}), query);
  call.returns(out, statistics, statistics.clone(), to_device(at::zeros({1}), query), int64_t(0), int64_t(0), int64_t(0));
}

void fusion_attention_grad(const Call &call) {
  auto query = call.device("query"), key = call.device("key");
  Training t(call, "scale_value");
  auto dy = Training::by_head(call.tensor("dy"));
  auto dp = at::matmul(dy, t.v.transpose(1, 2));
  auto ds = t.probabilities * (dp - (dp * t.probabilities).sum(-1, true)) * t.scale;
  auto dq = at::matmul(ds, t.k), dk = t.shared(at::matmul(ds.transpose(1, 2), t.q));
  auto dv = t.shared(at::matmul(t.probabilities.transpose(1, 2), dy));
  auto none = to_device(at::zeros({0}), query);
  std::vector<Tensor> results = {to_device(Training::back(dq, query), query), to_device(Training::back(dk, key), query),
                                 to_device(Training::back(dv, key), query)};
  auto count = call.schema.returns().size();
  while (results.size() < count) results.push_back(none);
  call.stack->erase(call.stack->end() - call.count, call.stack->end());
  for (auto &result : results) call.stack->push_back(result);
}

// --- mixtures of experts

void moe_gating_top_k(const Call &call) {
  call.wants(call.integer("k_group") == 1 && call.integer("group_count") == 1, "one group of experts");
  call.wants(call.integer("norm_type") == 0 && !call.given("bias_opt"), "softmax without bias");
  auto x = call.device("x");
  auto scores = host(x).to(at::kFloat).softmax(-1);
  auto [best, experts] = scores.topk(call.integer("k"), -1);
  if (call.integer("renorm")) best = best / (best.sum(-1, true) + call.number("eps"));
  best = (best * call.number("routed_scaling_factor")).to(x.scalar_type());
  call.returns(to_device(best, x), to_device(experts.to(at::kInt), x), to_device(scores, x));
}

// Rows in the order of their experts: those of `active_expert_range` alone, the rest of the output is zeros.
void moe_init_routing(const Call &call) {
  call.wants(call.integer("drop_pad_mode") == 0 && call.integer("row_idx_type") == 0, "no padding, rows as `gather`");
  call.wants(call.integer("quant_mode") == -1 && call.integer("expert_tokens_num_type") == 1, "counts, unquantized");
  auto x = call.device("x");
  auto rows = host(x), experts = call.tensor("expert_idx").to(at::kLong).flatten();
  auto range = call.integers("active_expert_range");
  auto active = experts.ge(range[0]).logical_and(experts.lt(range[1]));
  auto order = at::where(active, experts, at::full_like(experts, range[1])).argsort(/*stable=*/true, 0);
  auto count = active.sum().item<int64_t>(), chosen = experts.size(0) / rows.size(0);
  auto taken = order.slice(0, 0, count);
  auto expanded = at::zeros({experts.size(0), rows.size(1)}, rows.options());
  expanded.slice(0, 0, count).copy_(rows.index_select(0, taken.div(chosen, "floor")));
  auto place = at::full({experts.size(0)}, -1, at::kInt);
  place.index_copy_(0, taken, at::arange(count, at::kInt));
  auto counts = experts.index_select(0, taken).sub(range[0]).bincount({}, range[1] - range[0]);
  call.returns(to_device(expanded, x), to_device(place, x), to_device(counts, x), to_device(at::zeros({0}), x));
}

void grouped_matmul(const Call &call) {
  auto xs = call["x"].toTensorVector(), weights = call["weight"].toTensorVector();
  call.wants(xs.size() == 1 && weights.size() == 1 && call.integer("group_type") == 0, "rows in groups");
  call.wants(call.integer("group_list_type") == 1 && !call.given("bias") && !call.given("scale"), "counts, unquantized");
  auto x = host(xs[0]), weight = host(weights[0]), counts = call.tensor("group_list");
  auto out = at::zeros({x.size(0), weight.size(2)}, x.options());
  int64_t begin = 0;
  for (int64_t i = 0; i < counts.size(0); i++) {
    auto end = begin + counts[i].item<int64_t>();
    if (end > begin) out.slice(0, begin, end).copy_(at::matmul(x.slice(0, begin, end), weight[i]));
    begin = end;
  }
  call.returns(c10::List<Tensor>({to_device(out, xs[0])}));
}

void moe_token_unpermute(const Call &call) {
  call.wants(!call["padded_mode"].toBool(), "without padding");
  auto x = call.device("permuted_tokens");
  auto rows = host(x).index_select(0, call.tensor("sorted_indices").to(at::kLong).flatten());
  if (call.given("probs")) {
    auto probs = call.tensor("probs");
    rows = (rows.view({probs.size(0), probs.size(1), -1}) * probs.unsqueeze(-1)).sum(1).to(x.scalar_type());
  }
  call.returns(to_device(rows, x));
}

// --- gradients that torch leaves to a device's own operators

void matmul_backward(const Call &call) {
  auto like = call.device("self");
  auto grad = call.tensor("grad"), self = call.tensor("self"), other = call.tensor("other");
  call.wants(self.dim() >= 2 && other.dim() >= 2, "matrices");
  auto of_self = at::sum_to(at::matmul(grad, other.transpose(-2, -1)), self.sizes());
  auto of_other = at::sum_to(at::matmul(self.transpose(-2, -1), grad), other.sizes());
  call.returns(to_device(of_self, like), to_device(of_other, like));
}

struct Kernels {
  torch::Library aten{torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__};
  torch::Library npu{torch::Library::IMPL, "npu", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__};
  torch::Library atb{torch::Library::IMPL, "atb", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__};
  torch::Library custom{torch::Library::IMPL, "_C_ascend", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__};

  template <Kernel *kernel>
  void add(torch::Library &library, const char *name) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&boxed<kernel>>());
  }

  Kernels() {
    add<matmul_backward>(aten, "matmul_backward");
    add<npu_rms_norm>(npu, "npu_rms_norm");
    add<npu_rms_norm_backward>(npu, "npu_rms_norm_backward");
    add<npu_swiglu>(npu, "npu_swiglu");
    add<npu_swiglu_backward>(npu, "npu_swiglu_backward");
    add<fused_infer_attention_score>(npu, "npu_fused_infer_attention_score");
    add<fusion_attention>(npu, "npu_fusion_attention");
    add<fusion_attention_grad>(npu, "npu_fusion_attention_grad");
    add<matmul_add_fp32>(atb, "_npu_matmul_add_fp32");
    add<reshape_and_cache>(atb, "_npu_reshape_and_cache");
    add<rotary_embedding>(atb, "_npu_rotary_embedding");
    add<grouped_matmul>(npu, "npu_grouped_matmul");
    add<moe_token_unpermute>(npu, "npu_moe_token_unpermute");
    add<moe_gating_top_k>(custom, "moe_gating_top_k");
    add<moe_init_routing>(custom, "npu_moe_init_routing_custom");
    add<add_rms_norm_bias>(custom, "npu_add_rms_norm_bias");
  }
};
}  // namespace

extern "C" void compute_fused_on_host() {
  static std::optional<Kernels> kernels;
  kernels.emplace();
}
