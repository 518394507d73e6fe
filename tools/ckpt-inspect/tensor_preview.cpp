#include "ckpt-inspect/tensor_preview.h"

#include <algorithm>
#include <array>
#include <cstdio>

#include "cli/terminal.h"
#include "inspect/element.h"

namespace tessera::cli {
namespace {

constexpr std::int64_t kMaxEdge = 3;  // elements shown at either end of a dimension
constexpr const char* kGap = "…";
constexpr const char* kColumnGap = "  ";

// Returns the positions of a dimension to show: the first and last `edge` ones, with -1 between
// them for the gap; all if there are at most 2 * edge + 1.
std::vector<std::int64_t> positions(std::int64_t size, std::int64_t edge) {
  std::vector<std::int64_t> shown;
  const bool has_gap = size > 2 * edge + 1;
  for (std::int64_t i = 0; i < size; ++i) {
    if (has_gap && i == edge) {
      shown.push_back(-1);
      i = size - edge;
    }
    shown.push_back(i);
  }
  return shown;
}

std::string element_at(const inspect::TensorReader& tensor, std::int64_t index) {
  const DType dtype = tensor.meta().dtype;
  std::vector<std::byte> bytes(itemsize(dtype));
  tensor.read({index, index + 1}, bytes);
  if (!is_floating_point(dtype) || inspect::numbers_per_element(dtype) != 1) {
    return inspect::element_to_string(dtype, bytes);
  }
  double number = 0;
  inspect::to_doubles(dtype, bytes, {&number, 1});
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.4g", number);
  return text.data();
}

std::vector<std::string> aligned(const std::vector<std::vector<std::string>>& rows) {
  std::size_t width = 0;
  for (const auto& cells : rows) {
    for (const std::string& cell : cells) width = std::max(width, display_width(cell));
  }
  std::vector<std::string> lines;
  for (const auto& cells : rows) {
    std::string line;
    for (const std::string& cell : cells) {
      if (!line.empty()) line += kColumnGap;
      line += std::string(width - display_width(cell), ' ') + cell;
    }
    lines.push_back(std::move(line));
  }
  return lines;
}

}  // namespace

std::vector<std::string> preview_lines(const inspect::TensorReader& tensor, std::size_t max_width) {
  const Shape& shape = tensor.meta().shape;
  if (tensor.meta().numel() == 0) return {};
  const std::int64_t num_columns = shape.empty() ? 1 : shape.back();
  const std::int64_t num_rows = shape.size() < 2 ? 1 : shape[shape.size() - 2];
  std::vector<std::string> lines;
  for (std::int64_t edge = kMaxEdge; edge > 0; --edge) {
    std::vector<std::vector<std::string>> rows;
    for (std::int64_t row : positions(num_rows, kMaxEdge)) {
      auto& cells = rows.emplace_back();
      for (std::int64_t column : positions(num_columns, edge)) {
        const bool is_gap = row < 0 || column < 0;
        cells.push_back(is_gap ? kGap : element_at(tensor, row * num_columns + column));
      }
    }
    lines = aligned(rows);
    if (display_width(lines.front()) <= max_width) break;
  }
  return lines;
}

}  // namespace tessera::cli
