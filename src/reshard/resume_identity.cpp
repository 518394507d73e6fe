#include "reshard/resume_identity.h"

#include <string>
#include <string_view>

#include "base/digest.h"
#include "base/json.h"
#include "tessera/formats/format_writer.h"

namespace tessera::reshard {
namespace {

using formats::CreateOptions;

std::string digest_of(const std::vector<Value>& values) {
  Xxh3Wide hash;
  for (const Value& value : values) {
    const std::string text = value_to_json(value) + "\n";
    hash.update(std::as_bytes(std::span(text)));
  }
  return hash.hex_digest();
}

std::string describe(const CreateOptions& options) {
  const std::string described = formats::writer_of(options.format).describe_options(options);
  return std::string(options.format.name()) + (described.empty() ? "" : ", ") + described;
}

std::string describe(const formats::CheckpointContents& source) {
  std::uint64_t nbytes = 0;
  for (const formats::TensorEntry& tensor : source.tensors) nbytes += tensor.meta.nbytes();
  return std::to_string(source.tensors.size()) + " tensors of " + std::to_string(nbytes) +
         " bytes, " + std::to_string(source.values.size()) + " values, for " +
         std::to_string(source.world_size) + " ranks";
}

/// Returns `path` relative to the checkpoint or to its parent folder, because the checkpoint may
/// have moved before the next run. Returns any other path, such as one of another source of a
/// merge, unchanged.
std::string name_in(const std::string& checkpoint, const std::string& path) {
  const std::string parent = checkpoint.substr(0, checkpoint.rfind('/') + 1);  // npos + 1 is 0
  for (const std::string& folder : {checkpoint + "/", parent}) {
    if (!folder.empty() && path.starts_with(folder)) return path.substr(folder.size());
  }
  return path;
}

}  // namespace

formats::ResumeIdentity resume_identity(const Plan& plan, const formats::CheckpointReader& reader,
                                        const std::vector<Value>& values,
                                        const CreateOptions& options,
                                        const std::optional<FileStates>& source_files) {
  const FileStates states = source_files ? *source_files : source_file_states(reader);
  formats::ResumeIdentity identity;
  identity[formats::kPlanDigest] = plan_digest(plan, reader.contents());
  identity[formats::kPlanExplanation + std::string("source")] = describe(reader.contents());
  identity["destination"] = describe(options);
  identity[formats::kValuesDigest] = digest_of(values);
  std::vector<std::string> names;
  for (const std::string& path : reader.data_files()) {
    names.push_back(name_in(reader.path(), path));
    // Files of two merged sources may have the same name.
    std::string& said = identity["source " + names.back()];
    said += (said.empty() ? "" : "; ") + states.at(path).words;
  }
  // The members above do not tell two sources of a merge from the same sources in another order.
  if (!std::ranges::is_sorted(names)) {
    std::string order;
    for (const std::string& name : names) order += name + "\n";
    identity["order of sources"] = digest_of({Value(order)});
  }
  return identity;
}

}  // namespace tessera::reshard
