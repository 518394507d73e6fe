#pragma once

#include <string>
#include <string_view>

#include "tessera/base/file_system.h"

namespace tessera::arithmetic {

/// Returns whether the `config.json` beside a checkpoint of Hugging Face ties the output layer to
/// the input embedding, so that the checkpoint stores only one of the two. `tie_word_embeddings`
/// says so, at the top level or in `text_config`. If it is absent, which transformers leaves it if
/// it has the default of the model's class, a language model counts as tied: a checkpoint without
/// its output layer is complete only then. False if there is no such file, or no JSON in it.
/// Throws: Error(io).
bool says_tied_embeddings(const FileSystem& fs, const std::string& checkpoint_path);

/// Which end of a language model has a weight of this name: `model.embed_tokens.weight` is the
/// input, `lm_head.weight` the output.
enum class EmbeddingEnd { none, input, output };
EmbeddingEnd embedding_end_of(std::string_view fqn);

}  // namespace tessera::arithmetic
