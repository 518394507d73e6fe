#include "arithmetic/combined_reader.h"

#include <utility>

#include "tessera/base/error.h"

namespace tessera::arithmetic {

CombinedReader::CombinedReader(Sources sources, std::vector<LoraAdapter> adapters,
                               std::unique_ptr<const CombineOptions> options,
                               formats::CheckpointContents contents,
                               std::vector<TensorOrigin> tensors, std::vector<ValueOrigin> values)
    : sources_(std::move(sources)),
      adapters_(std::move(adapters)),
      options_(std::move(options)),
      contents_(std::move(contents)),
      tensors_(std::move(tensors)),
      values_(std::move(values)) {
  for_each_source([&](const formats::CheckpointReader& source) {
    path_ += (path_.empty() ? "" : " + ") + source.path();
  });
}

template <class Visit>
void CombinedReader::for_each_source(Visit visit) const {
  for (const auto& source : sources_) visit(*source);
  for (const LoraAdapter& adapter : adapters_) visit(*adapter.reader);
}

void CombinedReader::read_piece(std::size_t tensor_index, std::size_t piece_index, FlatRange range,
                                std::span<std::byte> out) const {
  const TensorOrigin& origin = tensors_[tensor_index];
  const formats::TensorEntry& tensor = contents_.tensors[tensor_index];
  if (std::holds_alternative<AsInFirst>(origin)) {
    return first().read_piece(tensor_index, piece_index, range, out);
  }
  const Region& region = tensor.pieces[piece_index].region;
  if (const auto* const taken = std::get_if<inspect::TensorReader>(&origin)) {
    return read_region(*taken, region, range, out);
  }
  std::get<TensorSum>(origin).read(region, range, tensor.meta.dtype, path_, out);
}

Value CombinedReader::read_value(std::size_t value_index) const {
  const ValueOrigin& origin = values_[value_index];
  return sources_[origin.source]->read_value(origin.index);
}

std::vector<std::string> CombinedReader::data_files() const {
  std::vector<std::string> files;
  for_each_source([&](const formats::CheckpointReader& source) {
    for (std::string& file : source.data_files()) files.push_back(std::move(file));
  });
  return files;
}

formats::MissingData CombinedReader::find_missing_data() const {
  std::vector<formats::MissingData> of_sources;
  for (const auto& source : sources_) of_sources.push_back(source->find_missing_data());
  formats::MissingData found{.pieces = of_sources.front().pieces, .values = {}};
  for (std::size_t i = 0; i < values_.size(); ++i) {
    const auto& values = of_sources[values_[i].source].values;
    const auto missing = values.find(values_[i].index);
    if (missing != values.end()) found.values.emplace(i, missing->second);
  }
  return found;
}

void CombinedReader::check_files(const formats::FindingSink& sink) const {
  for_each_source([&](const formats::CheckpointReader& source) { source.check_files(sink); });
}

void CombinedReader::check_rest(const formats::RestOptions& options) const {
  for_each_source(
      [&](const formats::CheckpointReader& source) { formats::check_rest(source, options); });
}

void CombinedReader::verify(const formats::FindingSink& sink, const formats::ProgressSink& progress,
                            int num_threads) const {
  for_each_source(
      [&](const formats::CheckpointReader& source) { source.verify(sink, progress, num_threads); });
}

}  // namespace tessera::arithmetic
