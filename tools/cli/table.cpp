#include "cli/table.h"

#include <algorithm>

namespace tessera::cli {
namespace {

constexpr std::size_t kGap = 2;
constexpr std::size_t kMinShrunkWidth = 16;
constexpr std::size_t kMaxAlignedWidth = 100;  // in a file, a longer text shifts only its own row

std::size_t total_width(const std::vector<std::size_t>& widths, const std::vector<bool>& is_shown) {
  std::size_t total = 0;
  for (std::size_t c = 0; c < widths.size(); ++c) {
    if (is_shown[c] && widths[c] > 0) total += widths[c] + (total > 0 ? kGap : 0);
  }
  return total;
}

}  // namespace

void Table::reserve(std::size_t num_rows, std::size_t text_nbytes) {
  cells_.reserve(num_rows * columns_.size());
  row_ends_.reserve(num_rows);
  texts_.reserve(text_nbytes);
}

void Table::add_row(std::span<const Cell> cells) {
  for (const Cell& cell : cells) {
    texts_ += cell.text;
    const auto width = static_cast<std::uint32_t>(display_width(cell.text));
    cells_.push_back({texts_.size(), width, cell.style, cell.extent});
  }
  row_ends_.push_back(cells_.size());
}

std::string_view Table::text_of(std::size_t cell) const {
  const std::size_t begin = cell == 0 ? 0 : cells_[cell - 1].text_end;
  return std::string_view(texts_).substr(begin, cells_[cell].text_end - begin);
}

void Table::print(Terminal& terminal) const {
  const bool is_terminal = terminal.output_is_terminal();
  std::vector<std::size_t> widths(columns_.size(), 0);
  std::size_t cell = 0;
  for (const std::size_t row_end : row_ends_) {
    for (std::size_t c = 0; cell < row_end; ++c, ++cell) {
      if (cells_[cell].extent == Cell::Extent::rest_of_line) {
        cell = row_end;
        break;
      }
      const std::size_t width = cells_[cell].width;
      if (width <= kMaxAlignedWidth || is_terminal) widths[c] = std::max(widths[c], width);
    }
  }
  std::vector<bool> is_shown(columns_.size(), true);
  for (const Alternates& pair : alternates_) is_shown[pair.narrow] = false;
  if (is_terminal) {
    const auto available = static_cast<std::size_t>(terminal.width());
    for (const Alternates& pair : alternates_) {
      if (total_width(widths, is_shown) <= available) break;
      for (const std::size_t column : pair.wide) is_shown[column] = false;
      is_shown[pair.narrow] = true;
    }
    const std::size_t total = total_width(widths, is_shown);
    if (shrinking_ != kNone && total > available) {
      const std::size_t excess = total - available;
      std::size_t& width = widths[shrinking_];
      width = std::max(width > excess ? width - excess : 0, std::min(width, kMinShrunkWidth));
    }
  }
  std::string line;
  for (std::size_t row = 0; row < row_ends_.size(); ++row) {
    line.clear();
    lay_out_row(row, widths, is_shown, terminal, line);
    terminal.print(line);
  }
}

void Table::lay_out_row(std::size_t row, const std::vector<std::size_t>& widths,
                        const std::vector<bool>& is_shown, const Terminal& terminal,
                        std::string& line) const {
  const std::size_t first_cell = row == 0 ? 0 : row_ends_[row - 1];
  std::size_t column = 0;   // current width of `line`
  std::size_t pending = 0;  // spaces to write before the next text
  for (std::size_t c = 0; first_cell + c < row_ends_[row]; ++c) {
    const StoredCell& cell = cells_[first_cell + c];
    std::string_view text = text_of(first_cell + c);
    const bool is_rest = cell.extent == Cell::Extent::rest_of_line;
    if (!is_rest && (!is_shown[c] || (widths[c] == 0 && text.empty()))) continue;
    if (column + pending > 0) pending += kGap;
    std::size_t width = cell.width;
    std::string shortened;
    if (c == shrinking_ && !is_rest && terminal.output_is_terminal()) {
      const std::size_t indent = std::min({text.find_first_not_of(' '), text.size(), widths[c]});
      shortened = std::string(text.substr(0, indent)) +
                  shorten_front(text.substr(indent), widths[c] - indent);
      text = shortened;
      width = display_width(text);
    }
    const std::size_t padding = is_rest ? 0 : widths[c] - std::min(widths[c], width);
    if (!is_rest && columns_[c] == Align::right) pending += padding;
    if (!text.empty()) {
      line.append(pending, ' ');
      column += pending + width;
      pending = 0;
      if (cell.style == Style::plain) {
        line += text;
      } else {
        line += terminal.styled(cell.style, text);
      }
    }
    if (is_rest) break;
    if (columns_[c] == Align::left) pending += padding;
  }
  line += '\n';
}

}  // namespace tessera::cli
