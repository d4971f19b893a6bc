// Package capture decides which parts of a training step become graphs, and manages
// those graphs.
//
// [Detect] says which groups of a policy lie in a captured scope, and rejects what
// cannot work, with the reason. [Scopes] leads every captured instance through its life:
// eager warm-up, capture, replay, and another capture after addresses moved.
//
// The files: place.go says which modules lie in which scope, detect.go applies the
// rules, report.go prints the result. key.go identifies instances, recorder.go captures
// a stream, scopes.go manages the life of instances.
package capture
