// Collects the verbs of ckpt-inspect. The help of each verb is in its own file, <verb>_command.cpp.
#include "ckpt-inspect/diff_command.h"
#include "ckpt-inspect/hash_command.h"
#include "ckpt-inspect/layout_command.h"
#include "ckpt-inspect/ls_command.h"
#include "ckpt-inspect/plan_command.h"
#include "ckpt-inspect/recipe_command.h"
#include "ckpt-inspect/report_command.h"
#include "ckpt-inspect/scan_command.h"
#include "ckpt-inspect/show_command.h"
#include "ckpt-inspect/stats_command.h"
#include "ckpt-inspect/tree_command.h"
#include "ckpt-inspect/verify_command.h"
#include "cli/format_rows.h"

int main(int argc, char** argv) {
  using namespace tessera::cli;
  Terminal terminal;
  return run_tool("ckpt-inspect", terminal, [&] {
    CommandLine line("ckpt-inspect", "Looks into checkpoints of any format", terminal);
    LsOptions ls;
    TreeOptions tree;
    ShowOptions show;
    StatsOptions stats;
    LayoutOptions layout;
    PlanCommandOptions plan;
    DiffCommandOptions diff;
    HashOptions hash;
    RecipeCommandOptions recipe;
    ReportOptions report;
    VerifyCommandOptions verify;
    ScanCommandOptions scan;
    add_tree_command(line, tree, terminal);
    add_ls_command(line, ls, terminal);
    add_show_command(line, show, terminal);
    add_stats_command(line, stats, terminal);
    add_layout_command(line, layout, terminal);
    add_plan_command(line, plan, terminal);
    add_diff_command(line, diff, terminal);
    add_hash_command(line, hash, terminal);
    add_verify_command(line, verify, terminal);
    add_recipe_command(line, recipe, terminal);
    add_scan_command(line, scan, terminal);
    add_report_command(line, report, terminal);
    line.add_section("Formats", format_rows());
    line.set_default_command("tree");
    return line.run(argc, argv);
  });
}
