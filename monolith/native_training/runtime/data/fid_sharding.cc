#include "monolith/native_training/runtime/data/fid_sharding.h"

#include <algorithm>
#include <cstddef>
#include <functional>
#include <utility>

#include "monolith/native_training/runtime/base/feature_id.h"
#include "monolith/native_training/runtime/distribution/id_index.h"
#include "monolith/native_training/runtime/distribution/id_sharding.h"

namespace monolith {
namespace data {
namespace {

using distribution::IdIndex;
using distribution::IdSharder;
using engine::FidV1ToV2;
using engine::ParallelRunner;

constexpr uint32_t kSharedBit = uint32_t{1} << 31;
constexpr int64_t kMaxRows = (int64_t{1} << 31) - 1;
constexpr uint64_t kLowHalf = 0xffffffffu;

// The ids of one feature by server. While lists are built an occurrence is (server, position).
struct FeatureShards {
  std::vector<std::vector<int64_t>> lists;
};

void ShardFeature(const FeatureRows& rows, const IdSharder& sharder, bool unique,
                  FeatureShards* shards, uint64_t* occurrence) {
  shards->lists.resize(static_cast<size_t>(sharder.num_shards()));
  int64_t num_ids = 0;
  for (const FidSpan& span : rows.spans) num_ids += span.size;
  IdIndex index(unique ? num_ids : 0);
  for (const FidSpan& span : rows.spans) {
    for (int64_t i = 0; i < span.size; ++i) {
      const int64_t id = static_cast<int64_t>(span.is_v1 ? FidV1ToV2(span.fids[i]) : span.fids[i]);
      const int64_t server = sharder(id);
      std::vector<int64_t>& list = shards->lists[server];
      const int64_t next = static_cast<int64_t>(list.size());
      // Positions of known ids are below `next`.
      const int64_t position = unique ? index.FindOrInsert(id, index.Hash(id), next) : next;
      if (position == next) list.push_back(id);
      *occurrence++ = static_cast<uint64_t>(server) << 32 | static_cast<uint64_t>(position);
    }
  }
}

// How (server, position) of one feature turns into the two halves of its offsets.
struct OffsetRule {
  std::vector<uint64_t> high;  // [servers]
  std::vector<uint64_t> base;  // [servers]
  uint64_t step = 1;

  uint64_t operator()(uint64_t occurrence) const {
    const uint64_t server = occurrence >> 32;
    return high[server] << 32 | (base[server] + (occurrence & kLowHalf) * step);
  }
};

// feature_offset, nfl_offset and the start of every feature in fid_offset.
std::string LayOutRows(const std::vector<FeatureRows>& rows, std::vector<int64_t>* starts,
                       ShardedFids* out) {
  int64_t num_rows = 0;
  for (const FeatureRows& feature : rows) num_rows += feature.num_rows();
  if (num_rows >= kMaxRows) {
    return "the batch has " + std::to_string(num_rows) + " rows of features, want fewer than " +
           std::to_string(kMaxRows);
  }
  out->feature_offset.reserve(static_cast<size_t>(num_rows) + 1);
  int64_t total = 0;
  for (const FeatureRows& feature : rows) {
    starts->push_back(total);
    out->nfl_offset.push_back(static_cast<uint32_t>(out->feature_offset.size()) |
                              (feature.shared ? kSharedBit : 0));
    for (int64_t row = 0; row < feature.num_rows(); ++row) {
      if (total > kMaxRows) break;
      out->feature_offset.push_back(static_cast<int32_t>(total));
      for (int64_t s = feature.row_splits[row]; s < feature.row_splits[row + 1]; ++s) {
        total += feature.spans[s].size;
      }
    }
  }
  if (total > kMaxRows) {
    return "the batch has more than " + std::to_string(kMaxRows) + " ids";
  }
  out->feature_offset.push_back(static_cast<int32_t>(total));
  out->nfl_offset.push_back(static_cast<uint32_t>(out->feature_offset.size()));
  out->fid_offset.resize(static_cast<size_t>(total));
  starts->push_back(total);
  return "";
}

// Joins the features' lists of one table and server and says where each feature's part starts.
void JoinLists(const ShardingPlan& plan, const std::vector<FeatureShards>& shards, int64_t table,
               int64_t server, int64_t num_servers, OffsetKind kind, std::vector<OffsetRule>* rules,
               ShardedFids* out) {
  const int64_t j = table * num_servers + server;
  const std::vector<int64_t>& features = plan.tables()[table];
  std::vector<int64_t>& ids = out->fid_lists[j];
  std::vector<int64_t>& splits = out->row_splits[j];
  splits.assign(1, 0);
  int64_t size = 0;
  for (int64_t f : features) size += static_cast<int64_t>(shards[f].lists[server].size());
  ids.reserve(static_cast<size_t>(size));
  int64_t floats = 0;
  for (int64_t f : features) {
    const std::vector<int64_t>& list = shards[f].lists[server];
    OffsetRule& rule = (*rules)[f];
    const int64_t base = kind == OffsetKind::kFloatOffset    ? floats
                         : kind == OffsetKind::kListPosition ? static_cast<int64_t>(ids.size())
                                                             : 0;
    rule.base[server] = static_cast<uint64_t>(base);
    if (kind != OffsetKind::kFeaturePosition) rule.high[server] = static_cast<uint64_t>(j);
    ids.insert(ids.end(), list.begin(), list.end());
    splits.push_back(static_cast<int64_t>(ids.size()));
    floats += static_cast<int64_t>(list.size()) * plan.features()[f].width;
  }
  out->embedding_sizes[j] = floats;
}

}  // namespace

std::string ShardingPlan::Build(const std::map<std::string, ShardedFeatureConfig>& features,
                                OffsetKind kind) {
  const int64_t least_width = kind == OffsetKind::kFloatOffset ? 1 : 0;
  std::map<std::string, std::vector<int64_t>> by_table;
  for (const auto& [name, config] : features) {
    if (config.width < least_width) {
      return "slice_dims of feature '" + name + "' add up to " + std::to_string(config.width) +
             ", want " + std::to_string(least_width) + " or more";
    }
    std::vector<int64_t>& members = by_table[config.table];
    Feature feature;
    feature.name = name;
    feature.index_in_table = static_cast<int64_t>(members.size());
    feature.width = config.width;
    members.push_back(static_cast<int64_t>(features_.size()));
    features_.push_back(feature);
  }
  for (auto& [table, members] : by_table) {
    for (int64_t f : members) features_[f].table = num_tables();
    table_names_.push_back(table);
    tables_.push_back(std::move(members));
  }
  return "";
}

std::string ShardFids(const ShardingPlan& plan, const std::vector<FeatureRows>& rows,
                      int64_t num_servers, bool unique, OffsetKind kind,
                      const ParallelRunner& parallel, ShardedFids* out) {
  const int64_t num_features = static_cast<int64_t>(plan.features().size());
  std::vector<int64_t> starts;
  const std::string problem = LayOutRows(rows, &starts, out);
  if (!problem.empty()) return problem;

  const int64_t cycles = num_features == 0 ? 1 : 40 * (starts.back() / num_features + 1);
  const IdSharder sharder(num_servers);
  std::vector<FeatureShards> shards(static_cast<size_t>(num_features));
  parallel.For(num_features, cycles, [&](int64_t begin, int64_t end) {
    for (int64_t f = begin; f < end; ++f) {
      ShardFeature(rows[f], sharder, unique, &shards[f], out->fid_offset.data() + starts[f]);
    }
  });

  const size_t num_lists = static_cast<size_t>(plan.num_tables() * num_servers);
  out->fid_lists.resize(num_lists);
  out->row_splits.resize(num_lists);
  out->embedding_sizes.resize(num_lists);
  std::vector<OffsetRule> rules(static_cast<size_t>(num_features));
  int64_t first_block = 0;
  for (const std::vector<int64_t>& features : plan.tables()) {
    const int64_t n = static_cast<int64_t>(features.size());
    for (int64_t f : features) {
      OffsetRule& rule = rules[f];
      rule.base.resize(static_cast<size_t>(num_servers));
      for (int64_t p = 0; p < num_servers; ++p) {
        rule.high.push_back(
            static_cast<uint64_t>(first_block + p * n + plan.features()[f].index_in_table));
      }
      if (kind == OffsetKind::kFloatOffset) {
        rule.step = static_cast<uint64_t>(plan.features()[f].width);
      }
    }
    first_block += n * num_servers;
  }
  // One task per list: a feature belongs to one table, so its rule has one writer per server.
  parallel.For(
      static_cast<int64_t>(num_lists), cycles / num_servers + 1, [&](int64_t begin, int64_t end) {
        for (int64_t j = begin; j < end; ++j) {
          JoinLists(plan, shards, j / num_servers, j % num_servers, num_servers, kind, &rules, out);
        }
      });
  for (size_t j = 0; j < num_lists; ++j) {
    if (out->embedding_sizes[j] > kMaxRows) {
      return "the embeddings of table '" + plan.table_names()[j / num_servers] + "' on server " +
             std::to_string(j % num_servers) + " need " + std::to_string(out->embedding_sizes[j]) +
             " floats, want at most " + std::to_string(kMaxRows);
    }
  }
  parallel.For(num_features, cycles / 8 + 1, [&](int64_t begin, int64_t end) {
    for (int64_t f = begin; f < end; ++f) {
      std::transform(out->fid_offset.data() + starts[f], out->fid_offset.data() + starts[f + 1],
                     out->fid_offset.data() + starts[f], std::cref(rules[f]));
    }
  });
  return "";
}

}  // namespace data
}  // namespace monolith
