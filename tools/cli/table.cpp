#include "cli/table.h"

#include <algorithm>

namespace tessera::cli {
namespace {

constexpr std::size_t kGap = 2;
constexpr std::size_t kMinShrunkWidth = 16;
constexpr std::size_t kMaxAlignedWidth = 100;  // a longer text pushes its own row alone

std::size_t total_width(const std::vector<std::size_t>& widths, const std::vector<bool>& is_shown) {
  std::size_t total = 0;
  for (std::size_t c = 0; c < widths.size(); ++c) {
    if (is_shown[c] && widths[c] > 0) total += widths[c] + (total > 0 ? kGap : 0);
  }
  return total;
}

}  // namespace

void Table::print(Terminal& terminal) const {
  const bool is_terminal = terminal.output_is_terminal();
  std::vector<std::size_t> widths(columns_.size(), 0);
  for (const auto& row : rows_) {
    for (std::size_t c = 0; c < row.size(); ++c) {
      if (row[c].extent == Cell::Extent::rest_of_line) break;
      const std::size_t width = display_width(row[c].text);
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
  for (const auto& row : rows_) print_row(row, widths, is_shown, terminal);
}

void Table::print_row(const std::vector<Cell>& row, const std::vector<std::size_t>& widths,
                      const std::vector<bool>& is_shown, Terminal& terminal) const {
  std::string line;
  std::size_t column = 0;   // reached by `line`
  std::size_t pending = 0;  // spaces that are due before the next text
  for (std::size_t c = 0; c < row.size(); ++c) {
    const Cell& cell = row[c];
    const bool is_rest = cell.extent == Cell::Extent::rest_of_line;
    if (!is_rest && (!is_shown[c] || (widths[c] == 0 && cell.text.empty()))) continue;
    if (column + pending > 0) pending += kGap;
    std::string text = cell.text;
    if (c == shrinking_ && !is_rest && terminal.output_is_terminal()) {
      const std::size_t indent = std::min({text.find_first_not_of(' '), text.size(), widths[c]});
      text = text.substr(0, indent) +
             shorten_front(std::string_view(text).substr(indent), widths[c] - indent);
    }
    const std::size_t width = display_width(text);
    const std::size_t padding = is_rest ? 0 : widths[c] - std::min(widths[c], width);
    if (!is_rest && columns_[c] == Align::right) pending += padding;
    if (!text.empty()) {
      line.append(pending, ' ');
      column += pending + width;
      pending = 0;
      line += cell.style == Style::plain ? text : terminal.styled(cell.style, text);
    }
    if (is_rest) break;
    if (columns_[c] == Align::left) pending += padding;
  }
  line += '\n';
  terminal.print(line);
}

}  // namespace tessera::cli
