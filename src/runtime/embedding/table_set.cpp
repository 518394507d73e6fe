#include <torch/types.h>

#include <algorithm>
#include <map>
#include <set>

#include "tessera/base/error.h"
#include "tessera/runtime/embedding/embedding_bag_collection.h"

namespace tessera {
namespace {

/// The maximum number of elements of a table. Up to this size, the bytes of the weight and of its
/// optimizer state (at most two floats for each element) fit into a 64-bit number.
constexpr std::int64_t kMostElements = std::int64_t{1} << 59;

void check(const EmbeddingBagConfig& config) {
  const auto refuse = [&](const std::string& rule, const std::string& expected,
                          const std::string& found) {
    throw Error::expected(ErrorKind::invalid_argument, {.fqn = config.name}, rule, expected, found);
  };
  if (config.name.empty() || config.name.find('.') != std::string::npos) {
    refuse("name of a table", "a name without dots, not empty", "'" + config.name + "'");
  }
  if (config.num_embeddings < 0) {
    refuse("num_embeddings", "0 or more", std::to_string(config.num_embeddings));
  }
  if (config.embedding_dim < 1) {
    refuse("embedding_dim", "1 or more", std::to_string(config.embedding_dim));
  }
  if (config.num_embeddings > kMostElements / config.embedding_dim) {
    refuse("num_embeddings",
           "at most " + std::to_string(kMostElements / config.embedding_dim) + " rows of " +
               std::to_string(config.embedding_dim) + " columns",
           std::to_string(config.num_embeddings));
  }
  if (config.feature_names.empty()) refuse("feature_names", "one or more", "none");
  std::set<std::string> features;
  for (const std::string& feature : config.feature_names) {
    if (!features.insert(feature).second) {
      refuse("feature_names", "each feature once", "'" + feature + "' twice");
    }
  }
  if (config.dtype != at::kFloat && config.dtype != at::kHalf && config.dtype != at::kBFloat16) {
    refuse("dtype of a table", "float32, float16 or bfloat16", c10::toString(config.dtype));
  }
}

}  // namespace

TableSet::TableSet(std::vector<EmbeddingBagConfig> configs,
                   const EmbeddingBagCollectionOptions& options)
    : configs_(std::move(configs)), options_(options) {
  std::set<std::string> names;
  std::map<std::string, int> num_tables_of;  // number of tables, by feature
  for (const EmbeddingBagConfig& config : configs_) {
    check(config);
    if (!names.insert(config.name).second) {
      throw Error::expected(ErrorKind::invalid_argument, {.fqn = config.name}, "name of a table",
                            "a different name for each table", "a second table of this name");
    }
    for (const std::string& feature : config.feature_names) ++num_tables_of[feature];
  }
  for (std::size_t table = 0; table < configs_.size(); ++table) {
    const EmbeddingBagConfig& config = configs_[table];
    for (const std::string& feature : config.feature_names) {
      outputs_.push_back({table, feature, output_width_});
      output_names_.push_back(num_tables_of[feature] == 1 ? feature : feature + "@" + config.name);
      output_widths_.push_back(config.embedding_dim);
      output_width_ += config.embedding_dim;
    }
  }
  std::set<std::string> seen;
  for (std::size_t i = 0; i < outputs_.size(); ++i) {
    if (seen.insert(output_names_[i]).second) continue;
    throw Error::expected(ErrorKind::invalid_argument, {.fqn = configs_[outputs_[i].table].name},
                          "name of an output", "each name once",
                          "'" + output_names_[i] + "' twice");
  }
}

KeyedTensor TableSet::named(at::Tensor pooled) const {
  return {output_names_, output_widths_, std::move(pooled)};
}

}  // namespace tessera
