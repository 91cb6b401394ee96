// What counting a query costs, part by part.
#pragma once

#include <memory>

#include "bench/gpu/store_run.cuh"

namespace tierkv::bench {

// Which kernels of a captured graph run: all, or one kind alone, so that its time can be told from
// that of what runs beside it. The others become empty nodes.
enum class Kernels { kAll, kCounting, kOthers };

inline void run_only(cudaGraphExec_t exec, cudaGraph_t graph, Kernels which) {
  size_t count = 0;
  check(cudaGraphGetNodes(graph, nullptr, &count), "nodes");
  std::vector<cudaGraphNode_t> nodes(count);
  check(cudaGraphGetNodes(graph, nodes.data(), &count), "nodes");
  for (cudaGraphNode_t node : nodes) {
    cudaGraphNodeType type;
    check(cudaGraphNodeGetType(node, &type), "node");
    if (type != cudaGraphNodeTypeKernel) continue;
    cudaKernelNodeParams params{};
    const char* name = nullptr;
    check(cudaGraphKernelNodeGetParams(node, &params), "node");
    check(cudaFuncGetName(&name, params.func), "name");
    const bool counts = std::string(name).find("count_query") != std::string::npos;
    const bool runs = which == Kernels::kAll || counts == (which == Kernels::kCounting);
    check(cudaGraphNodeSetEnabled(exec, node, runs ? 1 : 0), "node");
  }
}

// Of one layer; us.
struct CountingTimes {
  std::string cache;
  Timing attend;  // without
  Timing leaves;  // leaving its scores
  Timing counts;  // the counting from them alone
  Timing together;
};

// A step of a token, of all layers.
inline void take_step(DeviceKvStore* store, const Shape& shape, const Inputs& in,
                      const std::vector<SequenceId>& ids) {
  const SequenceList all = {ids.data(), shape.sequences};
  require(store->begin_step(all, 1), "begin_step");
  for (int32_t layer = 0; layer < shape.layers; ++layer) {
    require(store->append({all, layer, 1, in.k, in.v}), "append");
  }
}

// Attends to every layer in turn, on a store whose step is complete.
inline CountingTimes time_counting(DeviceKvStore* store, const Shape& shape, const Inputs& in,
                                   cudaStream_t stream, const std::vector<SequenceId>& ids) {
  const auto attend_all = [&](bool counts) {
    return [&, counts] {
      for (int32_t layer = 0; layer < shape.layers; ++layer) {
        AttendRequest request;
        request.sequences = {ids.data(), shape.sequences};
        request.layer = layer;
        request.q = in.k;
        request.out = in.out;
        request.count_query = counts;
        request.scratch = in.scratch;
        request.scratch_bytes = in.scratch_bytes;
        require(store->attend(request), "attend");
      }
    };
  };
  attend_all(false)();  // makes the plan, which the graphs then lack
  cudaGraphExec_t plain = capture(stream, attend_all(false));
  const cudaGraph_t graph = capture_graph(stream, attend_all(true));
  cudaGraphExec_t counted = instantiate(graph);
  const Weights weights;
  Watch attends(stream, weights), leaves(stream, weights), counts(stream, weights);
  Watch together(stream, weights);
  const auto replay = [stream](cudaGraphExec_t g) {
    return [g, stream] { check(cudaGraphLaunch(g, stream), "replay"); };
  };
  constexpr int32_t kWarm = 2, kTurns = 12;
  for (int32_t turn = 0; turn < kWarm + kTurns; ++turn) {
    const bool kept = turn >= kWarm;
    attends.time(kept, replay(plain));
    run_only(counted, graph, Kernels::kAll);
    together.time(kept, replay(counted));
    run_only(counted, graph, Kernels::kOthers);
    leaves.time(kept, replay(counted));
    run_only(counted, graph, Kernels::kCounting);
    counts.time(kept, replay(counted));
  }
  require(store->take_status(), "counting");
  const auto us = [&](Watch& watch) { return watch.result("", shape.layers).us; };
  return {shape.keep.empty() ? "mixed" : shape.keep, us(attends), us(leaves), us(counts),
          us(together)};
}

}  // namespace tierkv::bench
