#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cli/terminal.h"

namespace tessera::cli {

/// Prints rows of cells in aligned columns, two spaces apart. If the terminal is too narrow, narrow
/// columns replace wide ones (let_alternate), and then one column is cut at its front (let_shrink).
/// If standard output is not a terminal, wide columns are printed in full.
class Table {
 public:
  enum class Align { left, right };
  struct Cell {
    std::string text;
    Style style = Style::plain;
    /// `rest_of_line`: the text may continue beyond its column, so it does not make the column
    /// wider.
    enum class Extent : std::uint8_t { one_column, rest_of_line } extent = Extent::one_column;
  };

  explicit Table(std::vector<Align> columns) : columns_(std::move(columns)) {}

  /// Names the column that is cut if the terminal is too narrow.
  void let_shrink(std::size_t column) { shrinking_ = column; }
  /// Declares that the columns in `wide` and the column `narrow` have the same content. Shows the
  /// wide ones if there is room, else the narrow one.
  void let_alternate(std::vector<std::size_t> wide, std::size_t narrow) {
    alternates_.push_back({std::move(wide), narrow});
  }
  /// Reserves memory for rows that will be added. `text_nbytes`: bytes of text in all these rows.
  void reserve(std::size_t num_rows, std::size_t text_nbytes);
  /// Adds a row, which may have fewer cells than there are columns.
  void add_row(std::span<const Cell> cells);
  void add_row(std::initializer_list<Cell> cells) {
    add_row(std::span(cells.begin(), cells.end()));
  }
  bool empty() const { return row_ends_.empty(); }
  void print(Terminal& terminal) const;

 private:
  static constexpr std::size_t kNone = static_cast<std::size_t>(-1);
  struct Alternates {
    std::vector<std::size_t> wide;
    std::size_t narrow;
  };

  // A cell. The texts of all cells are in one string; `text_end` is where this cell's text ends.
  struct StoredCell {
    std::size_t text_end;
    std::uint32_t width;
    Style style;
    Cell::Extent extent;
  };

  /// Appends a row to `line`.
  void lay_out_row(std::size_t row, const std::vector<std::size_t>& widths,
                   const std::vector<bool>& is_shown, const Terminal& terminal,
                   std::string& line) const;
  std::string_view text_of(std::size_t cell) const;

  std::vector<Align> columns_;
  std::size_t shrinking_ = kNone;
  std::vector<Alternates> alternates_;
  std::string texts_;
  std::vector<StoredCell> cells_;
  std::vector<std::size_t> row_ends_;  // one per row: the number of cells up to its end
};

}  // namespace tessera::cli
