// A format that Tessera does not have, in one file: shows that a driver is all that a format needs.
//
//     rows 1
//     layer.weight 2x3 1 2 3 4 5 6
//     layer.bias 2 0.5 -1
//
// Each line is a tensor of float32: its name, its shape, its elements.
#include <charconv>
#include <cstring>
#include <map>

#include "tessera/base/error.h"
#include "tessera/formats/format_driver.h"

namespace {

using namespace tessera;
using namespace tessera::formats;

constexpr Format kRows{"rows"};
constexpr std::string_view kFirstLine = "rows 1\n";
constexpr std::uint64_t kMaxNbytes = 1 << 20;

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> fields;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find(separator), text.size());
    fields.push_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return fields;
}

template <class Number>
Number parse(std::string_view text, const std::string& path, std::string_view fqn) {
  Number number{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) {
    throw Error::expected(ErrorKind::corruption, {.path = path, .fqn = std::string(fqn)}, "number",
                          "one", "'" + printable(text) + "'");
  }
  return number;
}

class RowsReader final : public CheckpointReader {
 public:
  RowsReader(const FileSystem& fs, std::string path) : path_(std::move(path)) {
    const std::string text = read_file(fs, path_, kMaxNbytes);
    std::map<std::string, std::string_view, std::less<>> lines;  // sorted by name
    for (const std::string_view line :
         split(std::string_view(text).substr(kFirstLine.size()), '\n')) {
      lines.emplace(line.substr(0, line.find(' ')), line);
    }
    for (const auto& [fqn, line] : lines) add(fqn, split(line, ' '));
  }

  Format format() const override { return kRows; }
  const std::string& path() const override { return path_; }
  const CheckpointContents& contents() const override { return contents_; }

  void read_piece(std::size_t tensor_index, std::size_t /*piece_index*/, FlatRange range,
                  std::span<std::byte> out) const override {
    std::memcpy(out.data(), elements_[tensor_index].data() + range.begin, out.size());
  }
  Value read_value(std::size_t /*value_index*/) const override { return {}; }
  PieceStorage piece_storage(std::size_t tensor_index, std::size_t /*piece_index*/) const override {
    return {.file = last_component(path_),
            .byte_range = std::nullopt,
            .encoding = "text",
            .stored_nbytes = contents_.tensors[tensor_index].meta.nbytes()};
  }
  void check_files(const FindingSink& /*sink*/) const override {}
  std::vector<std::string> data_files() const override { return {path_}; }
  using CheckpointReader::verify;
  void verify(const FindingSink& /*sink*/, const ProgressSink& progress,
              int /*num_threads*/) const override {
    for (const TensorEntry& tensor : contents_.tensors) progress(tensor.meta.nbytes());
  }

 private:
  void add(const std::string& fqn, const std::vector<std::string_view>& words) {
    TensorEntry entry;
    entry.meta = {fqn, DType::float32, {}};
    if (words.size() > 1) {
      for (const std::string_view size : split(words[1], 'x')) {
        entry.meta.shape.push_back(parse<std::int64_t>(size, path_, fqn));
      }
    }
    std::vector<float> elements;
    for (std::size_t i = 2; i < words.size(); ++i) {
      elements.push_back(parse<float>(words[i], path_, fqn));
    }
    if (entry.meta.numel() != static_cast<std::int64_t>(elements.size())) {
      throw Error::expected(ErrorKind::corruption, {.path = path_, .fqn = fqn}, "elements",
                            std::to_string(entry.meta.numel()), std::to_string(elements.size()));
    }
    entry.pieces.push_back({whole_box(entry.meta.shape), 0});
    contents_.tensors.push_back(std::move(entry));
    elements_.push_back(std::move(elements));
  }

  std::string path_;
  CheckpointContents contents_;
  std::vector<std::vector<float>> elements_;  // parallel to contents_.tensors
};

class RowsDriver final : public FormatDriver {
 public:
  Format format() const override { return kRows; }
  FormatDescription description() const override {
    return {.title = "Rows of numbers", .in_directory = "", .as_file = "a file of rows"};
  }
  FormatTraits traits() const override {
    return {.pieces = FormatTraits::Pieces::whole_tensors, .can_be_written = false};
  }
  Recognition recognize_directory(const DirectoryListing& /*directory*/) const override {
    return {};
  }
  Recognition recognize_file(const FileBegin& file) const override {
    return {file.bytes.starts_with(kFirstLine) ? Match::certain : Match::none};
  }
  std::unique_ptr<CheckpointReader> open(const FileSystem& fs,
                                         const std::string& path) const override {
    return std::make_unique<RowsReader>(fs, path);
  }
};

const RowsDriver driver;
[[maybe_unused]] const bool is_registered = (register_format(driver), true);

}  // namespace
