#include "arithmetic/tied_embeddings.h"

#include <algorithm>
#include <array>
#include <optional>

#include "arithmetic/model_config.h"
#include "tessera/base/error.h"
#include "tessera/base/value.h"

namespace tessera::arithmetic {
namespace {

std::optional<bool> flag_of(const Value& config, std::string_view member) {
  const Value* const value = config.find(member);
  const bool* const flag = value ? value->get_if<bool>() : nullptr;
  return flag ? std::optional(*flag) : std::nullopt;
}

/// Returns whether the model has an output layer over its vocabulary, which can be tied. A
/// classifier, for example, has none.
bool is_language_model(const Value& config) {
  constexpr std::array<std::string_view, 5> kHeads = {"LMHead", "ForCausalLM", "ForMaskedLM",
                                                      "ForConditionalGeneration", "DoubleHeads"};
  const Value* const names = config.find("architectures");
  const auto* const list = names ? names->get_if<Value::List>() : nullptr;
  if (list == nullptr) return false;
  return std::ranges::any_of(*list, [&](const Value& each) {
    const auto* const name = each.get_if<std::string>();
    return name != nullptr && std::ranges::any_of(kHeads, [&](std::string_view head) {
             return name->find(head) != std::string::npos;
           });
  });
}

bool ties_embeddings(const Value& config) {
  if (!is_language_model(config)) return false;
  auto flag = flag_of(config, "tie_word_embeddings");
  const Value* const text_config = config.find("text_config");
  if (!flag && text_config != nullptr) flag = flag_of(*text_config, "tie_word_embeddings");
  return flag.value_or(true);
}

}  // namespace

bool says_tied_embeddings(const FileSystem& fs, const std::string& checkpoint_path) {
  try {
    return ties_embeddings(read_model_config(fs, checkpoint_path));
  } catch (const Error&) {
    return false;  // no JSON: only a note is lost
  }
}

EmbeddingEnd embedding_end_of(std::string_view fqn) {
  constexpr std::array<std::string_view, 9> kInputs = {
      "embed_tokens",    "wte",        "word_embeddings", "tok_embeddings", "shared", "embed_in",
      "token_embedding", "embeddings", "word_embedding"};
  constexpr std::array<std::string_view, 4> kOutputs = {"lm_head", "embed_out", "proj_out",
                                                        "output"};
  constexpr std::string_view kWeight = ".weight";
  if (!fqn.ends_with(kWeight)) return EmbeddingEnd::none;
  fqn.remove_suffix(kWeight.size());
  const std::string_view layer = fqn.substr(fqn.rfind('.') + 1);  // npos + 1 is 0
  if (std::ranges::find(kInputs, layer) != kInputs.end()) return EmbeddingEnd::input;
  // `decoder.output` and the like are layers inside; the output layer of a model is at its top.
  const bool is_output = std::ranges::find(kOutputs, layer) != kOutputs.end();
  if (is_output && (layer != "output" || fqn == layer)) return EmbeddingEnd::output;
  return fqn.ends_with("predictions.decoder") || fqn.ends_with("lm_head.decoder")
             ? EmbeddingEnd::output
             : EmbeddingEnd::none;
}

}  // namespace tessera::arithmetic
