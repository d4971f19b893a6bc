// Package engine decides where the saved tensors of a training step live, and moves
// them there. It ties the mechanisms together: offload copies tensors to the host and
// back, stash keeps rows in pages, capture makes graphs, policy chooses. The root
// package is its API for training loops; the trainer, the benchmarks and the PyTorch
// bridge use it directly.
//
// Only the bridge needs what the root package does not have: steps without a body
// ([Runtime.Begin], [Step.End]), borrowed memory ([Step.Borrow],
// Config.ProvideMemory, [Step.Drain], [Step.TensorOf]), and a saved limit that changes
// between steps ([Runtime.SetSavedLimit]).
//
// The files, each of which uses only those above it and the runtime's fields:
//
//	links.go       the measurement of links
//	events.go      the trace of what happens
//	config.go      the configuration, and the choices that it makes
//	runtime.go     what lives from Open to Close
//	learn.go       what is known of the steps under a key, and how it becomes a plan
//	rows.go        rows of experts, and in which tier the stash keeps them
//	calibrate.go   the later looks at a recorded step's times
//	savedlimit.go  the limit on saved tensors, and plans under a changed limit
//	step.go        a step from its beginning to its end
//	group.go       what a forward pass saves, and how a backward pass finds it
//	scope.go       the parts of a step that are captured
//	summary.go     what steps did, and what they are expected to take
//
// # Recording a step and following it
//
// The first step under a key is recorded, and later steps follow what it taught. Here
// that is one sequence, for steps with and without a body: knowledge, open, close,
// conclude (step.go). Two mechanisms keep a record of their own. The stash records in
// which order groups are saved and loaded, because it restores rows ahead of need also
// in loops that have no engine. Package fsdp records in which order FSDP units are
// used, which has nothing to do with saved tensors.
package engine
