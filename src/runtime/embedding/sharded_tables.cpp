#include "runtime/embedding/sharded_tables.h"

#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/types.h>

#include <algorithm>
#include <limits>
#include <map>
#include <set>

#include "base/digest.h"
#include "runtime/autograd_node.h"
#include "runtime/embedding/device_input.h"
#include "runtime/embedding/host_input.h"
#include "runtime/embedding/initial_weight.h"
#include "runtime/embedding/table_device.h"
#include "runtime/embedding/table_memory.h"
#include "runtime/torch_bridge.h"
#include "tessera/base/error.h"

namespace tessera::embedding {
namespace {

using at::Tensor;

void check_plan(const TableSet& tables, const TablePlan& plan, int world_size) {
  if (plan.world_size != world_size) {
    throw Error::expected(ErrorKind::mismatch, {}, "plan for embedding tables",
                          "a plan for the " + std::to_string(world_size) + " ranks of the mesh",
                          "a plan for " + std::to_string(plan.world_size) + " ranks");
  }
  std::set<std::string> names;
  for (const EmbeddingBagConfig& config : tables.configs()) {
    names.insert(config.name);
    const auto rule = plan.tables.find(config.name);
    if (rule == plan.tables.end()) {
      throw Error::expected(ErrorKind::mismatch, {.fqn = config.name}, "plan for embedding tables",
                            "a rule for every table", "none for this table",
                            "make a new plan with embedding::plan, or add a rule");
    }
    if (const auto problem = problem_of(rule->second, world_size)) {
      throw Error::expected(ErrorKind::mismatch, {.fqn = config.name},
                            problem->what + " in the rule of a table", problem->expected,
                            problem->found);
    }
  }
  for (const auto& [name, rule] : plan.tables) {
    if (names.contains(name)) continue;
    throw Error::expected(ErrorKind::mismatch, {.fqn = name}, "plan for embedding tables",
                          "a table of this name in the collection", "none");
  }
}

void check_kernels(const TableSet& tables, const ShardOptions& options) {
  for (const auto& [name, kernel] : options.kernel) {
    const auto& configs = tables.configs();
    if (std::ranges::find(configs, name, &EmbeddingBagConfig::name) == configs.end()) {
      throw Error::expected(ErrorKind::invalid_argument, {.fqn = name}, "kernel of a table",
                            "a table of this name in the collection", "none");
    }
    if (kernel == Kernel::fused && !options.optimizer) {
      throw Error::expected(ErrorKind::invalid_argument, {.fqn = name}, "kernel of a table",
                            "the dense kernel, or an optimizer in ShardOptions",
                            "the fused kernel without an optimizer");
    }
  }
}

const Box& box_of(const Shard& shard) {
  return std::get<Box>(shard.region);
}

bool holds(const Shard& shard, int rank) {
  return std::ranges::find(shard.ranks, rank) != shard.ranks.end();
}

/// Returns the ranks that hold columns of the same rows as `region`, in order of columns.
std::vector<int> column_peers(const std::vector<Shard>& layout, const Box& region) {
  std::vector<std::pair<std::int64_t, int>> peers;
  for (const Shard& shard : layout) {
    const Box& box = box_of(shard);
    if (box.offsets[0] == region.offsets[0]) peers.emplace_back(box.offsets[1], shard.ranks[0]);
  }
  std::ranges::sort(peers);
  std::vector<int> ranks;
  for (const auto& [column, rank] : peers) ranks.push_back(rank);
  return ranks;
}

std::uint64_t fingerprint_of(const TableSet& tables, const TablePlan& plan,
                             const std::vector<LocalTable>& local,
                             const std::optional<FusedOptimizer>& optimizer,
                             const std::map<std::string, std::int64_t>& cached_rows) {
  std::string text = plan.to_json();
  for (std::size_t i = 0; i < local.size(); ++i) {
    const EmbeddingBagConfig& config = tables.configs()[i];
    text += c10::str(config.name, ' ', config.num_embeddings, ' ', config.embedding_dim, ' ',
                     config.feature_names, ' ', static_cast<int>(config.pooling), ' ', config.dtype,
                     ' ', static_cast<int>(local[i].kernel), '\n');
  }
  for (const auto& [name, num_rows] : cached_rows) text += c10::str(name, ' ', num_rows, '\n');
  text += tables.options().is_weighted ? "weighted " : "";
  text += optimizer ? name_of(*optimizer) : "no optimizer";
  return xxh3_64(std::as_bytes(std::span(text)));
}

/// Returns the columns of the assignments' outputs in the output of the whole collection.
PooledColumns output_columns(const TableSet& tables, const std::vector<Assignment>& assignments) {
  PooledColumns columns{{}, tables.output_width()};
  for (const Assignment& each : assignments) {
    for (const std::size_t output : each.outputs) {
      columns.first.push_back(tables.outputs()[output].column + each.columns.begin);
    }
  }
  return columns;
}

/// Returns columns for the assignments' outputs, one after the other, without gaps.
PooledColumns packed_columns(const std::vector<Assignment>& assignments) {
  PooledColumns columns;
  for (const Assignment& each : assignments) {
    for (std::size_t i = 0; i < each.outputs.size(); ++i) {
      columns.first.push_back(columns.width);
      columns.width += each.columns.numel();
    }
  }
  return columns;
}

/// Returns whether an optimizer has taken steps that its state for this parameter remembers.
bool has_state(const registry::FusedParameter& parameter) {
  if (parameter.step != nullptr && *parameter.step != 0) return true;
  return std::ranges::any_of(parameter.slots, [](const registry::FusedParameter::Slot& slot) {
    return std::ranges::any_of(slot.entry.local_shards, [](const LocalShard& local) {
      return local.tensor.any().item<bool>();
    });
  });
}

/// Copies this rank's part of a whole table's optimizer state. Throws if `table` has state of
/// another kind, unless the optimizer of `whole` has not taken a step yet.
void copy_state(const registry::FusedParameter& whole, LocalTable& table) {
  const auto name_of_slot = [](const auto& slot) { return slot.name; };
  const bool is_same_kind =
      std::ranges::equal(whole.slots, table.state.slots, {}, name_of_slot, name_of_slot);
  if (!is_same_kind) {
    if (!has_state(whole)) return;
    std::string found;
    for (const auto& slot : whole.slots) found += (found.empty() ? "" : ", ") + slot.name;
    throw Error::expected(
        ErrorKind::invalid_argument, {.fqn = table.name}, "optimizer of a table",
        "the fused kernel, with the kind of optimizer of the collection, whose state " + found +
            " would be lost",
        table.kernel == Kernel::dense ? "the dense kernel" : "another kind of optimizer");
  }
  for (std::size_t i = 0; i < table.state.slots.size(); ++i) {
    const LocalShard& local = whole.slots[i].entry.local_shards.front();
    Tensor state = local.tensor.narrow(0, table.region.offsets[0], table.region.sizes[0]);
    if (state.dim() == 2) {
      state = state.narrow(1, table.region.offsets[1], table.region.sizes[1]);
    }
    table.state.slots[i].tensor.copy_(state);
  }
  if (whole.step != nullptr) table.state.step = *whole.step;
}

}  // namespace

ShardedTables::ShardedTables(const EmbeddingBagCollectionBase& collection, const TablePlan& plan,
                             const dist::Mesh& mesh, const ShardOptions& options)
    : tables_(collection.tables()),
      plan_(plan),
      mesh_(mesh),
      optimizer_(options.optimizer),
      device_(device_for_tables(collection, mesh, options)),
      world_(mesh.world()->separate("tables")),
      alone_(std::make_shared<dist::Group>("tables alone", device_)) {
  if (!device_.is_cpu()) {
    input_group_ = mesh.world()->separate("batches of tables");
    input_stream_ = std::make_shared<SideStream>(device_);
  }
  check_plan(tables_, plan, mesh.world_size());
  check_kernels(tables_, options);
  check_cached_rows(options);
  has_caches_ = !device_.is_cpu() && !options.cached_rows.empty();
  if (optimizer_) check_numbers(*optimizer_);
  place_all(collection, options);
  Assignments sharded(static_cast<std::size_t>(mesh.world_size()));
  Assignments replicated(1);
  for (std::size_t table = 0; table < tables_.configs().size(); ++table) {
    std::vector<std::size_t> outputs;
    for (std::size_t i = 0; i < tables_.outputs().size(); ++i) {
      if (tables_.outputs()[i].table == table) outputs.push_back(i);
    }
    const bool is_replicated = local_[table].is_replicated();
    for (const Shard& shard : local_[table].layout) {
      const Box& box = box_of(shard);
      const Assignment assignment{table,
                                  {box.offsets[0], box.offsets[0] + box.sizes[0]},
                                  {box.offsets[1], box.offsets[1] + box.sizes[1]},
                                  box.sizes[0] == tables_.configs()[table].num_embeddings,
                                  outputs};
      if (box.numel() == 0) continue;
      if (is_replicated) {
        replicated[0].push_back(assignment);
      } else {
        for (const int rank : shard.ranks) {
          sharded[static_cast<std::size_t>(rank)].push_back(assignment);
        }
      }
    }
  }
  lay_out_columns(sharded, replicated[0]);
  const auto own = static_cast<std::size_t>(mesh.rank());
  sharded_lookup_ = Lookup(sharded[own], pooled_columns_[own], local_, world_, device_);
  replicated_lookup_ =
      Lookup(replicated[0], output_columns(tables_, replicated[0]), local_, world_, device_);
  static_fingerprint_ = fingerprint_of(tables_, plan_, local_, optimizer_, options.cached_rows);
  sharded_ = std::make_shared<const Assignments>(std::move(sharded));
  replicated_ = std::make_shared<const Assignments>(std::move(replicated));
}

void ShardedTables::lay_out_columns(const Assignments& sharded,
                                    const std::vector<Assignment>& replicated) {
  std::set<std::int64_t> written;  // first output columns of the blocks so far
  std::int64_t num_written = 0;
  const auto write = [&](std::int64_t column, std::int64_t width) {
    const bool is_first = written.insert(column).second;
    if (is_first) num_written += width;
    return is_first;
  };
  for (const std::vector<Assignment>& assignments : sharded) {
    // A single rank pools directly into the output.
    const PooledColumns in_output = output_columns(tables_, assignments);
    pooled_columns_.push_back(sharded.size() == 1 ? in_output : packed_columns(assignments));
    RankBlocks& of_rank = blocks_.emplace_back(RankBlocks{{}, pooled_columns_.back().width});
    std::vector<Block>& blocks = of_rank.blocks;
    for (const Assignment& each : assignments) {
      for (std::size_t i = 0; i < each.outputs.size(); ++i) {
        const std::size_t block = blocks.size();
        const std::int64_t to = in_output.first[block];
        const std::int64_t width = each.columns.numel();
        blocks.push_back({pooled_columns_.back().first[block], to, width, write(to, width)});
      }
    }
  }
  for (const Assignment& each : replicated) {
    for (const std::size_t output : each.outputs) {
      write(tables_.outputs()[output].column, each.columns.numel());
    }
  }
  covers_output_ = num_written == tables_.output_width();
  has_means_ = std::ranges::any_of(tables_.configs(), [](const EmbeddingBagConfig& config) {
    return config.pooling == Pooling::mean;
  });
}

/// Creates this rank's shards. If creating them fails on one rank, throws on all ranks.
void ShardedTables::place_all(const EmbeddingBagCollectionBase& collection,
                              const ShardOptions& options) {
  std::optional<std::uint64_t> seed;
  if (std::ranges::any_of(tables_.configs(), [&](const EmbeddingBagConfig& config) {
        return collection.weight(config.name).is_meta();
      })) {
    seed = draw_seed(*world_);
  }
  std::exception_ptr failure;
  try {
    for (std::size_t table = 0; table < tables_.configs().size(); ++table) {
      local_.push_back(place(collection, table, options, seed));
    }
  } catch (...) {
    failure = std::current_exception();
    local_.clear();  // frees memory, which the next collective may need
  }
  double failed = failure ? mesh_.rank() + 1 : 0;  // 1 + the rank that failed; 0: none
  if (mesh_.world_size() > 1) failed = world_->max(failed, "whether tables are placed");
  if (failure) std::rethrow_exception(failure);
  if (failed > 0) {
    throw Error::expected(ErrorKind::unsupported, {}, "embedding tables",
                          "every rank to make its shards",
                          "an error on rank " + std::to_string(static_cast<int>(failed) - 1),
                          "the error of that rank says what is wrong");
  }
}

/// Creates this rank's shard of a table.
LocalTable ShardedTables::place(const EmbeddingBagCollectionBase& collection, std::size_t table,
                                const ShardOptions& options, std::optional<std::uint64_t> seed) {
  const EmbeddingBagConfig& config = tables_.configs()[table];
  const Shape shape = {config.num_embeddings, config.embedding_dim};
  const Tensor whole = collection.weight(config.name).detach();
  if (whole.sizes() != at::IntArrayRef(shape)) {
    throw Error::expected(ErrorKind::invalid_argument, {.fqn = config.name}, "weight of a table",
                          shape_to_string(shape), c10::str(whole.sizes()),
                          "tessera::shard takes whole tables");
  }
  LocalTable local;
  local.table = table;
  local.name = config.name;
  local.rule = plan_.tables.at(config.name);
  local.num_columns = config.embedding_dim;
  local.dtype = config.dtype;
  const auto kernel = options.kernel.find(config.name);
  local.kernel = kernel != options.kernel.end() ? kernel->second
                 : options.optimizer            ? Kernel::fused
                                                : Kernel::dense;
  local.layout = table_shards(local.rule, shape, mesh_.world_size());
  local.region = Box{{0, 0}, {0, config.embedding_dim}};
  for (const Shard& shard : local.layout) {
    if (holds(shard, mesh_.rank())) local.region = box_of(shard);
  }
  if (!local.is_replicated()) local.column_peers = column_peers(local.layout, local.region);
  local.device = device_;
  allocate(local, options);
  if (whole.is_meta()) {
    // Makes the initial values on the host, so that they do not depend on the device.
    Tensor values =
        local.weight.is_cpu() ? local.weight : torch::empty(local.region.sizes, config.dtype);
    initialize_shard(config, local.region, *seed, values);
    if (!local.weight.is_cpu()) local.weight.copy_(values);
  } else {
    local.weight.copy_(whole.narrow(0, local.region.offsets[0], local.region.sizes[0])
                           .narrow(1, local.region.offsets[1], local.region.sizes[1]));
  }
  local.weight.requires_grad_(collection.weight(config.name).requires_grad());
  if (const auto* const fused = dynamic_cast<const registry::UpdatesParameters*>(&collection)) {
    const auto parameters = fused->fused_updates()->parameters();
    copy_state(*std::ranges::find(parameters, "embedding_bags." + config.name + ".weight",
                                  &registry::FusedParameter::name),
               local);
  }
  return local;
}

/// Throws for a table whose rows cannot be cached.
void ShardedTables::check_cached_rows(const ShardOptions& options) const {
  for (const auto& [name, num_rows] : options.cached_rows) {
    const auto refuse = [&](const std::string& expected, const std::string& found) {
      throw Error::expected(ErrorKind::invalid_argument, {.fqn = name}, "cached_rows of a table",
                            expected, found);
    };
    const auto rule = plan_.tables.find(name);
    if (rule == plan_.tables.end()) refuse("a table of this name in the collection", "none");
    if (num_rows < 1 || num_rows > std::numeric_limits<std::int32_t>::max()) {
      refuse("1 to 2147483647", std::to_string(num_rows));
    }
    const auto kernel = options.kernel.find(name);
    const bool is_dense = kernel != options.kernel.end() ? kernel->second == Kernel::dense
                                                         : !options.optimizer.has_value();
    if (is_dense) refuse("the fused kernel", "the dense kernel, whose gradient has all rows");
    if (rule->second.sharding == TableSharding::data_parallel) {
      refuse("a table that is sharded", "data_parallel, whose gradients have all rows");
    }
  }
}

/// Allocates a shard's weight and the state of its fused optimizer.
void ShardedTables::allocate(LocalTable& local, const ShardOptions& options) const {
  const Shape& shape = local.region.sizes;
  const std::int64_t numel = local.region.numel();
  std::int64_t nbytes = numel * static_cast<std::int64_t>(c10::elementSize(local.dtype));
  if (local.kernel == Kernel::fused) {
    for (const auto& slot : initial_state(*options.optimizer, 0, 0).slots) {
      const bool is_row_wise = slot.kind == formats::StateKind::row_wise;
      nbytes += (is_row_wise ? shape[0] : numel) * static_cast<std::int64_t>(sizeof(float));
    }
  }
  const auto cached = options.cached_rows.find(local.name);
  const bool is_cached =
      !device_.is_cpu() && cached != options.cached_rows.end() && cached->second < shape[0];
  TableMemory memory{.table = local.name, .nbytes = static_cast<std::uint64_t>(nbytes)};
  if (!is_cached) {
    allocate_on(device_, memory, [&] {
      local.weight = table_memory(shape, local.dtype, device_);
      if (local.kernel != Kernel::fused) return;
      local.state = initial_state(*options.optimizer, shape[0], shape[1], device_);
    });
    return;
  }
  allocate_pinned(memory, [&] {
    local.weight = pinned(shape, local.dtype);
    local.state = initial_state(*options.optimizer, shape[0], shape[1],
                                [](at::IntArrayRef its) { return pinned(its, at::kFloat); });
  });
  memory.what = "cached rows of a table and their optimizer state";
  memory.nbytes = memory.nbytes / static_cast<std::uint64_t>(shape[0]) *
                  static_cast<std::uint64_t>(cached->second);
  allocate_on(device_, memory, [&] {
    local.cache = std::make_unique<RowCache>(local.name, local.weight, local.state, cached->second,
                                             input_stream_);
  });
}

StateTensor ShardedTables::weight_entry(const LocalTable& table) const {
  StateTensor entry;
  entry.dtype = dtype_of(table.weight.scalar_type());
  const EmbeddingBagConfig& config = tables_.configs()[table.table];
  entry.shape = {config.num_embeddings, config.embedding_dim};
  entry.layout = table.layout;
  if (!table.is_empty() || numel_of(entry.shape) == 0) {
    entry.local_shards.push_back({table.region, table.weight.detach()});
  }
  return entry;
}

StateTensor ShardedTables::state_entry(const LocalTable& table,
                                       const FusedState::Slot& slot) const {
  StateTensor entry = weight_entry(table);
  entry.dtype = DType::float32;
  entry.kind = slot.kind;
  if (slot.kind == formats::StateKind::row_wise) {
    // All column shards of a row have the same row-wise state. So the state is saved once, in one
    // dimension.
    entry.shape.resize(1);
    std::map<std::int64_t, Shard> by_row;
    for (const Shard& shard : table.layout) {
      const Box& box = box_of(shard);
      Shard& rows = by_row[box.offsets[0]];
      rows.region = Box{{box.offsets[0]}, {box.sizes[0]}};
      rows.ranks.insert(rows.ranks.end(), shard.ranks.begin(), shard.ranks.end());
    }
    entry.layout.clear();
    for (auto& [row, shard] : by_row) {
      std::ranges::sort(shard.ranks);
      entry.layout.push_back(std::move(shard));
    }
    if (!entry.local_shards.empty()) {
      entry.local_shards.front().region = Box{{table.region.offsets[0]}, {table.region.sizes[0]}};
    }
  }
  if (!entry.local_shards.empty()) entry.local_shards.front().tensor = slot.tensor;
  return entry;
}

// --- forward and backward

/// The autograd node of a lookup. Its inputs are the tables' weights and the batch's sample
/// weights; its output is the pooled output.
class LookupNode final : public torch::autograd::Node {
 public:
  /// `passes`: the passes that include the forward.
  LookupNode(std::shared_ptr<ShardedTables> tables, std::shared_ptr<Inputs> inputs,
             registry::MeetingPoint::Passes passes)
      : tables_(std::move(tables)), inputs_(std::move(inputs)), passes_(std::move(passes)) {}

  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    if (at::GradMode::is_enabled()) {
      throw Error::expected(ErrorKind::unsupported, {}, "backward of an embedding collection",
                            "create_graph(false)", "create_graph(true)");
    }
    if (!inputs_) {
      throw Error::expected(
          ErrorKind::invalid_argument, {}, "backward of an embedding collection",
          "one backward for each forward", "a second backward",
          "the first one may have updated the tables; retain_graph does not work here");
    }
    const auto inputs = std::exchange(inputs_, nullptr);
    // If this rank has no gradient for the output, it sends zeros, because another rank may have
    // one.
    Tensor gradient =
        gradients[0].defined()
            ? gradients[0].to(at::kFloat)
            : torch::zeros({inputs->sharded->batch().batch_size, tables_->tables().output_width()},
                           tables_->float_options());
    // A backward for some tensors only (torch::autograd::grad, or `inputs` of backward) must not
    // update other tables.
    bool moves_tables = false;
    for (LocalTable& table : tables_->local()) {
      table.is_in_backward = task_should_compute_output(table.table);
      moves_tables |= table.is_in_backward;
    }
    Tensor weight_gradients;
    if (inputs->weights.defined()) {
      weight_gradients = torch::zeros({inputs->weights.numel()}, tables_->float_options());
    }
    tables_->meeting_point()->meet_in(passes_);
    auto result = tables_->backward(*inputs, gradient, weight_gradients, moves_tables);
    result.push_back(std::move(weight_gradients));
    return result;
  }

  void release_variables() override { inputs_ = nullptr; }

 private:
  std::shared_ptr<ShardedTables> tables_;
  std::shared_ptr<Inputs> inputs_;
  registry::MeetingPoint::Passes passes_;
};

void ShardedTables::set_optimizer(const FusedOptimizer& optimizer) {
  if (!optimizer_ || optimizer_->index() != optimizer.index()) {
    throw Error::expected(ErrorKind::invalid_argument, {}, "optimizer of embedding tables",
                          optimizer_ ? std::string(name_of(*optimizer_)) : "none",
                          std::string(name_of(optimizer)),
                          "set_optimizer changes numbers such as lr, not the kind of optimizer");
  }
  check_numbers(optimizer);
  optimizer_ = optimizer;
}

/// Returns the hash of tables, plan and options that ranks compare, without numbers such as lr.
std::uint64_t ShardedTables::fingerprint() const {
  std::string trained;
  for (const LocalTable& table : local_) trained += table.weight.requires_grad() ? '1' : '0';
  return static_fingerprint_ ^ xxh3_64(std::as_bytes(std::span(trained)));
}

std::shared_ptr<Inputs> ShardedTables::start(const KeyedJaggedTensor& batch) {
  OwnBatch own{.batch = batch, .refusal = nullptr};
  // Set under a NoGradGuard too, because `forward` may run later without the guard.
  own.wants_weight_gradients = batch.has_weights() && batch.weights().requires_grad();
  return start(own);
}

std::shared_ptr<Inputs> ShardedTables::refuse(std::exception_ptr why) {
  return start(OwnBatch{.batch = std::nullopt, .refusal = std::move(why)});
}

/// For tables on a device. At the first batch, throws if ranks have different tables, because the
/// sizes of messages depend on the tables. Waits for the device. Collective.
void ShardedTables::compare_tables() {
  if (mesh_.world_size() == 1 || have_equal_tables_) return;
  const auto own = static_cast<std::int64_t>(static_fingerprint_);
  Tensor all = torch::empty({mesh_.world_size()}, at::TensorOptions(device_).dtype(at::kLong));
  input_group_->all_gather(all, torch::full({1}, own, all.options()), "hash of the tables").wait();
  all = all.to(at::kCPU);
  for (int rank = 0; rank < mesh_.world_size(); ++rank) {
    if (all.const_data_ptr<std::int64_t>()[rank] == own) continue;
    throw Error::expected(ErrorKind::mismatch, {}, "embedding collection",
                          "the same tables, plan, kernels and optimizer on every rank",
                          "different ones on rank " + std::to_string(rank));
  }
  have_equal_tables_ = true;
}

std::shared_ptr<Inputs> ShardedTables::start(const OwnBatch& batch) {
  auto inputs = std::make_shared<Inputs>();
  inputs->tables = weak_from_this();
  if (batch.wants_weight_gradients) {
    const at::AutoGradMode with_history(true);
    inputs->weights = batch.batch->weights().to(float_options());
  }
  const std::uint64_t common = fingerprint();
  if (device_.is_cpu()) {
    inputs->sharded = std::make_unique<HostInput>(tables_, sharded_, world_, batch, common);
    inputs->replicated = std::make_unique<HostInput>(tables_, replicated_, alone_, batch, common);
    return inputs;
  }
  compare_tables();
  using HostIds = DeviceInput::HostIds;
  inputs->sharded =
      std::make_unique<DeviceInput>(tables_, sharded_, input_group_, batch, common, input_stream_,
                                    sharded_lookup_.has_caches() ? HostIds::copied : HostIds::none);
  inputs->replicated =
      std::make_unique<DeviceInput>(tables_, replicated_, alone_, batch, common, input_stream_);
  return inputs;
}

Tensor ShardedTables::forward(const std::shared_ptr<Inputs>& inputs) {
  if (inputs == nullptr || inputs->tables.lock().get() != this || inputs->is_used) {
    throw Error::expected(ErrorKind::invalid_argument, {}, "input of an embedding collection",
                          "an unused input from the `distribute` of the same collection",
                          inputs == nullptr ? "no input, or an input that was moved from"
                          : inputs->is_used ? "an input that was used before"
                                            : "an input of another collection");
  }
  inputs->is_used = true;
  return looked_up(inputs, meeting_point_->meet());
}

Tensor ShardedTables::forward(const KeyedJaggedTensor& batch) {
  // Calls `meet` before `start` sends anything. Otherwise, if `meet` throws, a message would be in
  // transit, and a later receive would get this message by mistake.
  const registry::MeetingPoint::Passes passes = meeting_point_->meet();
  return looked_up(start(batch), passes);
}

Tensor ShardedTables::looked_up(const std::shared_ptr<Inputs>& inputs,
                                const registry::MeetingPoint::Passes& passes) {
  Tensor output;
  {
    const at::NoGradGuard no_grad;
    output = pooled(*inputs);
  }
  torch::autograd::variable_list sources;
  for (const LocalTable& table : local_) sources.push_back(table.weight);
  sources.push_back(inputs->weights);
  // If any rank wants gradients of its sample weights, the backward has collectives, so all ranks
  // must run it. A rank that wants no gradient then has a node without inputs.
  if (at::GradMode::is_enabled() && (torch::autograd::compute_requires_grad(sources) ||
                                     inputs->sharded->returns_weight_gradients())) {
    auto node = make_node<LookupNode>(shared_from_this(), inputs, passes);
    node->set_next_edges(torch::autograd::collect_next_edges(sources));
    torch::autograd::set_history(output, node);
  }
  return output;
}

Tensor ShardedTables::pooled(Inputs& inputs) {
  Input& sharded = *inputs.sharded;
  const LocalBags& bags = fetched_bags(inputs);
  const std::vector<std::int64_t> shape{sharded.batch().batch_size, tables_.output_width()};
  Tensor output =
      covers_output_ ? torch::empty(shape, float_options()) : torch::zeros(shape, float_options());
  if (mesh_.world_size() == 1) {
    sharded_lookup_.pooled(bags, output);
  } else {
    exchange_pooled(bags, sharded, output);
  }
  replicated_lookup_.pooled(inputs.replicated->bags(), output);
  if (has_means_) divide_means(tables_, sharded.batch(), sharded.lengths(), output);
  return output;
}

const LocalBags& ShardedTables::fetched_bags(Inputs& inputs) {
  const LocalBags& bags = inputs.sharded->bags();
  if (!has_caches_) return bags;
  std::exception_ptr failure;
  try {
    sharded_lookup_.check_room(bags);
  } catch (...) {
    failure = std::current_exception();
  }
  double failed = failure ? mesh_.rank() + 1 : 0;  // 1 + the rank that failed; 0: none
  {
    // On the stream of the inputs, `max` waits for the batches, but not for a running lookup or
    // backward.
    const c10::StreamGuard guard(input_stream_->stream());
    failed = input_group_->max(failed, "whether cached rows fit");
  }
  if (failure) std::rethrow_exception(failure);
  if (failed > 0) {
    throw Error::expected(ErrorKind::unsupported, {}, "batch of cached embedding tables",
                          "rows that fit on every rank",
                          "too many on rank " + std::to_string(static_cast<int>(failed) - 1),
                          "the error of that rank says which table");
  }
  inputs.resident = sharded_lookup_.fetch(bags);
  return inputs.resident.bags;
}

void ShardedTables::write_back_cached_rows() {
  for (LocalTable& table : local_) {
    if (table.cache) table.cache->write_back();
  }
}

std::vector<std::int64_t> ShardedTables::pooled_here(const Input& input) const {
  std::vector<std::int64_t> sizes = input.batch_sizes();
  for (std::int64_t& size : sizes) size *= sharded_lookup_.width();
  return sizes;
}

std::vector<std::int64_t> ShardedTables::pooled_for_own(const Input& input) const {
  std::vector<std::int64_t> sizes;
  for (const PooledColumns& columns : pooled_columns_) {
    sizes.push_back(input.batch().batch_size * columns.width);
  }
  return sizes;
}

void ShardedTables::exchange_pooled(const LocalBags& bags, const Input& input,
                                    Tensor& output) const {
  const std::vector<std::int64_t> num_received = pooled_for_own(input);
  Tensor local = torch::empty({bags.num_samples, sharded_lookup_.width()}, output.options());
  sharded_lookup_.pooled(bags, local);
  Tensor received = torch::empty({sum_of(num_received)}, output.options());
  world_->all_to_all(received, num_received, local.view({-1}), pooled_here(input), "pooled rows")
      .wait();
  sum_pooled(blocks_, received, output);
}

/// The backward of exchange_pooled. Sends to each rank the gradient of the values that it pooled
/// for this rank's samples. Returns the gradient of the values that this rank pooled.
Tensor ShardedTables::exchange_gradient(const Input& input, const Tensor& gradient) const {
  const std::vector<std::int64_t> num_received = pooled_here(input);
  Tensor received = torch::empty({sum_of(num_received)}, gradient.options());
  world_
      ->all_to_all(received, num_received, cut_gradient(blocks_, gradient), pooled_for_own(input),
                   "gradients of pooled rows")
      .wait();
  return received;
}

std::vector<Tensor> ShardedTables::backward(Inputs& inputs, Tensor gradient,
                                            Tensor weight_gradients, bool moves_tables) {
  Input& sharded = *inputs.sharded;
  if (has_means_) {
    gradient = gradient.clone(at::MemoryFormat::Contiguous);
    divide_means(tables_, sharded.batch(), sharded.lengths(), gradient);
  } else {
    gradient = gradient.contiguous();
  }
  const Tensor local = mesh_.world_size() == 1 ? gradient : exchange_gradient(sharded, gradient);
  if (has_caches_) sharded_lookup_.keep(inputs.resident, sharded.bags());
  const LocalBags& bags = has_caches_ ? inputs.resident.bags : sharded.bags();
  if (sharded.returns_weight_gradients()) {  // before the update changes rows
    sharded.return_weight_gradients(sharded_lookup_.sample_weight_gradients(bags, local),
                                    weight_gradients);
  }
  if (weight_gradients.defined()) {
    inputs.replicated->return_weight_gradients(
        replicated_lookup_.sample_weight_gradients(inputs.replicated->bags(), gradient),
        weight_gradients);
  }
  std::vector<Tensor> gradients(local_.size());
  if (!moves_tables) return gradients;
  for (LocalTable& table : local_) {
    if (takes_steps(table))
      ++table.state.step;  // also for empty shards, so that all ranks have the same step
  }
  for (const LocalTable& table : local_) {
    // Empty shards get a gradient too. Then torch.optim makes state for the same parameters on all
    // ranks.
    if (table.kernel == Kernel::dense && table.weight.requires_grad() && table.is_empty()) {
      gradients[table.table] = torch::zeros_like(table.weight, at::TensorOptions());
    }
  }
  const FusedOptimizer* const optimizer = optimizer_ ? &*optimizer_ : nullptr;
  if (has_caches_) sharded_lookup_.mark_changed(inputs.resident);
  sharded_lookup_.backward(bags, local, optimizer, gradients);
  replicated_lookup_.backward(inputs.replicated->bags(), gradient, optimizer, gradients);
  return gradients;
}

}  // namespace tessera::embedding
