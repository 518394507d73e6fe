#include "cli/table.h"

#include <algorithm>
#include <numeric>

namespace tessera::cli {
namespace {

constexpr std::size_t kGap = 2;
constexpr std::size_t kMinShrunkWidth = 16;

}  // namespace

void Table::print(Terminal& terminal) const {
  std::vector<std::size_t> widths(columns_.size(), 0);
  for (const auto& row : rows_) {
    for (std::size_t c = 0; c < row.size(); ++c) {
      widths[c] = std::max(widths[c], display_width(row[c].text));
    }
  }
  if (shrinking_ != kNone && terminal.output_is_terminal()) {
    const std::size_t total =
        std::accumulate(widths.begin(), widths.end(), kGap * (widths.size() - 1));
    const auto available = static_cast<std::size_t>(terminal.width());
    if (total > available) {
      const std::size_t excess = total - available;
      std::size_t& width = widths[shrinking_];
      width = std::max(width > excess ? width - excess : 0, std::min(width, kMinShrunkWidth));
    }
  }
  std::string line;
  for (const auto& row : rows_) {
    line.clear();
    std::size_t pending = 0;  // spaces that are due before the next text
    for (std::size_t c = 0; c < row.size(); ++c) {
      if (c > 0) pending += kGap;
      const std::string text =
          c == shrinking_ ? shorten_middle(row[c].text, widths[c]) : row[c].text;
      const std::size_t padding = widths[c] - std::min(widths[c], display_width(text));
      if (columns_[c] == Align::right) pending += padding;
      if (!text.empty()) {
        line.append(pending, ' ');
        pending = 0;
        line += row[c].style == Style::plain ? text : terminal.styled(row[c].style, text);
      }
      if (columns_[c] == Align::left) pending += padding;
    }
    line += '\n';
    terminal.print(line);
  }
}

}  // namespace tessera::cli
