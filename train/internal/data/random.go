// This file owns the random numbers. They are part of what a checkpoint means:
// another generator would give other batches, so that this one must stay as it is.

package data

import "math/bits"

// mix is the step and output of splitmix64: a bijection that spreads every bit.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// rounds of the permutation: four make a Feistel network hard to tell from random,
// and small domains, where a half has few bits, want more.
const rounds = 8

// permute maps [0, n) onto itself one to one, without a table. A Feistel network
// permutes the numbers of an even count of bits, at most 4n of them; where it leads
// out of [0, n) it is applied again, and comes back since it goes in circles.
func permute(i, n, key uint64) uint64 {
	half := (bits.Len64(n-1) + 1) / 2
	mask := uint64(1)<<half - 1
	for {
		left, right := i>>half, i&mask
		for r := range uint64(rounds) {
			left, right = right, left^mix(key+mix(right+r<<32))&mask
		}
		if i = left<<half | right; i < n {
			return i
		}
	}
}
