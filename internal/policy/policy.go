// Package policy decides what to do with the saved tensors of a training step: keep,
// stash, offload or recompute, for every module of every layer. It works on a recorded
// step and measured link rates, and uses no device. It simulates each candidate with the
// machine that the runtime follows (package residency), so its forecast of memory is
// exact.
//
// byhand.go owns the choices that a user makes, profile.go a recorded step and the step
// under a policy, plan.go what is offloaded and when it is reloaded, rows.go rows of
// experts in pages, simulate.go and lanes.go forecasts of time and memory, solve.go and
// improve.go the choices for a budget, regular.go those for many similar layers, bound.go
// what a candidate takes at least, section.go steps that repeat themselves, balance.go
// choices for all ranks of a pipeline, follow.go the plans for choices made by hand, and
// report.go the reasons.
package policy
