// This file owns what tests outside of the package see of its inside.

package check

// Failure is the error that Explore returns.
type Failure = failure

var (
	FormatHolds = formatHolds
	ParseHolds  = parseHolds
)
