// Package memory is the vocabulary of Stowage: sizes, kinds of memory, the names of
// what a training step saves, and the choices that can be made for it. It holds no state
// and reaches no device.
//
// # Glossary
//
// Every word has one meaning in code, documentation and messages, and types of this
// package carry the same names. Three words have a second meaning that their place makes
// plain. In kernels a chunk is a piece of a copy, of 4 KiB. A record, as a noun, is
// what the stash notes about the pages of a group, and recording an event is a stream's
// operation. The planner's plan is its whole answer about a job, and the plan of a pool is
// where buckets lie in it.
//
// Where memory lies:
//
//	device memory   the accelerator's own memory ([Device])
//	host memory     pinned host memory that the accelerator reaches over its link ([Host])
//	tier            device memory or host memory, as a place for pages or copies
//	ledger          a device's exact account of who holds how many bytes of which kind
//	peak            the most bytes of a kind that a ledger has counted at once
//	budget          the device memory that a rank or process may hold at its peak,
//	                whoever holds it: weights, gradients, optimiser, temporaries, saved
//	                tensors, workspaces and pages
//	saved limit     a limit on the device memory of saved tensors, with the workspaces
//	                and pages of their rows; berths do not count
//	borrowed        said of device memory that the caller of Stowage owns: Stowage copies
//	                and returns it and counts it against the saved limit, and the ledger
//	                does not count it
//
// What a step saves:
//
//	module          a named part of a layer, such as core_attn; [Modules] lists them
//	saved tensors   what a forward pass keeps for the backward pass (activations)
//	storage         the bytes behind one or more tensors that are views of them
//	group           the saved tensors of one module of one layer of one microbatch ([GroupID])
//	unit            one module of one layer ([Unit]): what a choice is made for
//	FSDP unit       the parameters of a layer that are gathered together; always
//	                written with its first word
//	chunk           a virtual pipeline stage of a rank
//	row             one routed token's vector in one expert tensor
//
// What can be done with it:
//
//	choice          keep, stash, offload or recompute ([Choice])
//	policy          the choice for every unit ([Policy])
//	named policy    a memory policy of the trainer that a user asks for by name, such as
//	                offload (train.Policies); policies follow from it
//	keep            leave it in device memory
//	stash           copy its live rows into pages; restore copies them back. Also the
//	                store of these pages
//	offload         copy it to host memory; reload copies it back, and a prefetch is a
//	                reload that is issued ahead of need
//	recompute       drop it and run its forward pass again
//	evict           offload something because there is no room, not because of a plan
//	solver          finds the policy with the shortest predicted step within a budget
//
// How a step runs:
//
//	step            the passes of all microbatches between two updates of the optimiser
//	pass            the forward or the backward work of a layer or group; it begins and ends
//	key             what tells steps apart that need plans of their own ([Key])
//	record          run the first step under a key and note its calls and times
//	profile         a recorded step with what is known of its units
//	plan            what a policy means for every group of a step: what is offloaded,
//	                and when it is reloaded
//	scope           a part of a step that is captured as one graph ([Scope])
//	lane            a stream as a sequence of work; storages have three: compute, copies
//	                out and copies in
//	capture, replay making a graph of issued work; issuing that graph
//	overflow        rows that find no page in any tier; the step is then rerun
//	rerun           undo a step and run it again with more room
//
// How rows of experts are held:
//
//	workspace       worst-case buffers that the experts of all layers share
//	set             one copy of a workspace's buffers
//	page            a fixed number of bytes of the stash in one tier
//	spill           to take a page from the host tier because the device tier has none
//	berth           the reserved addresses of one PyTorch tensor with memory for its
//	                live rows only
//	routing counts  how many rows each expert rank received, step by step
//
// How parameters are sharded:
//
//	bucket          the parameters of an FSDP unit of one type and one group of ranks
//	pool            the memory that buckets are gathered into
//	shard           the part of a bucket that one rank keeps
//
// What is known afterwards:
//
//	trace           the file in which a run says what it did, event by event
//	report          the page that shows runs to people
//	summary         the figures of a run or step
//	forecast        what the planner, the solver or a dry run expects; to predict is to
//	                make a forecast
package memory
