#include "ckpt-reshard/dequantize_option.h"

#include <utility>

#include "arithmetic/dequantized_reader.h"
#include "arithmetic/model_config.h"
#include "tessera/base/error.h"
#include "tessera/formats/detect.h"

namespace tessera::cli {

std::string dequantize_identity(const FileSystem& fs, const std::vector<std::string>& paths,
                                const MoveOptions& options) {
  if (options.dequantize.empty()) return {};
  std::string digests;
  for (const std::string& path : paths) {
    std::string digest = arithmetic::model_config_digest(fs, path);
    if (digest.empty() && !options.extra_files_folder.empty()) {
      digest = arithmetic::model_config_digest(fs, options.extra_files_folder);
    }
    if (&path != &paths.front()) digests += '+';
    digests += digest;
  }
  return digests;
}

std::string quantization_method(const FileSystem& fs, const std::string& path,
                                const MoveOptions& options) {
  std::string method = formats::read_quantization_method(fs, path);
  if (method.empty() && !options.extra_files_folder.empty()) {
    method = formats::read_quantization_method(fs, options.extra_files_folder);
  }
  return method;
}

std::unique_ptr<formats::CheckpointReader> apply_dequantize(
    std::unique_ptr<formats::CheckpointReader> reader, const FileSystem& fs,
    const std::vector<std::string>& paths, const MoveOptions& options,
    std::vector<formats::Finding>& problems, std::optional<Dequantized>& done,
    const std::shared_ptr<arithmetic::RoundingLosses>& losses) {
  if (options.dequantize.empty()) return reader;
  const auto dtype = parse_dtype(options.dequantize);
  if (!dtype || !arithmetic::can_be_dequantized_to(*dtype)) {
    throw UsageError("--dequantize: expected bfloat16, float16, float32 or float64, found '" +
                         printable(options.dequantize) + "'",
                     "ckpt-reshard --help");
  }
  std::vector<Value> configs;
  for (const std::string& path : paths) {
    Value& config = configs.emplace_back(arithmetic::read_model_config(fs, path));
    if (config.is<Value::None>() && !options.extra_files_folder.empty()) {
      config = arithmetic::read_model_config(fs, options.extra_files_folder);
    }
  }
  auto result = arithmetic::dequantize(std::move(reader), *dtype, configs,
                                       NameSelection(options.only), options.on_overflow, losses);
  problems.insert(problems.end(), result.problems.begin(), result.problems.end());
  if (!done) done.emplace();
  done->dtype = *dtype;
  done->has_weights = done->has_weights || result.has_weights;
  done->num_weights += result.num_weights;
  done->num_companions += result.num_companions;
  return std::move(result.reader);
}

}  // namespace tessera::cli
